"""Planning files of token ids, in tiny sizes."""

import json
from pathlib import Path

from headrace.bench import planning
from headrace.front.tokenizer import Tokenizer
from headrace.offline.plan_input import read_plan_input
from headrace.offline.planning.tree import PrefixTree


def no_tokenizer() -> Tokenizer:
    raise AssertionError("prompts are token ids")


def test_files_share_half_of_their_tokens(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    planning.write(path, 64, 100, seed=3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == 64
    given = read_plan_input(path, no_tokenizer)
    assert 90 < given.requests.prompt_lengths.mean() < 110
    saved = PrefixTree.of(given.requests).saved_tokens
    assert 0.4 < saved / given.requests.prompt_lengths.sum() < 0.5
    again = tmp_path / "again.jsonl"
    planning.write(again, 64, 100, seed=3)
    assert again.read_bytes() == path.read_bytes()


def test_each_size_is_planned_in_a_process_of_its_own() -> None:
    result = planning.measure([40, 120], 60)
    small, large = result["sizes"]
    assert (small["requests"], large["requests"]) == (40, 120)
    assert small["file_mb"] <= large["file_mb"]
    assert all(one["read_s"] >= 0 and one["peak_mb"] > 10 for one in result["sizes"])
    assert result["total_s"] == [round(one["read_s"] + one["plan_s"], 2) for one in result["sizes"]]
