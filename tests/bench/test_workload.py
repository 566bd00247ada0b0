import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.workload import forced_lengths, items, mixed, params_of, read_requests, write_requests
from headrace.core.errors import ConfigError


class Words:
    """A tokenizer of whole words: the id of a word is its length."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> list[int]:
        assert options["add_generation_prompt"]
        return [0] + [len(message["content"]) for message in conversation]


def never() -> Words:
    raise AssertionError("no text to tokenise")


def test_the_mixed_workload_is_fixed_by_its_seed() -> None:
    """The digest is of the requests that the peer scripts make from the same seeds."""
    pairs = [[(item.prompt, item.max_tokens) for item in mixed(seed)] for seed in (0, 1)]
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    assert digest == "d7827cc3a61a0ad06714df52a4eb5b2e19d23c52cd756fa25e3f628a2b08cffc"


def test_the_mixed_workload_has_the_shape_it_says() -> None:
    batch = mixed(3)
    long = [item for item in batch if item.max_tokens == 16]
    assert len(batch) == 64
    assert len(long) == 32
    assert {len(item.prompt) for item in long} == {630}
    assert {(len(item.prompt), item.max_tokens) for item in batch if item not in long} == {(40, 200)}
    documents = [tuple(item.prompt[:600]) for item in long]
    assert len(set(documents)) == 8
    assert all(documents.count(d) == 4 for d in documents)
    assert all(item.params.greedy and item.params.ignore_eos for item in batch)


def test_written_requests_read_back(tmp_path: Path) -> None:
    batch = [*mixed(0)[3:6], *items([([1, 2], 4)], stop=("x",), temperature=0.5, seed=3)]
    path = tmp_path / "r.jsonl"
    write_requests(batch, path)
    assert read_requests(path, never) == batch
    line = json.loads(path.read_text().splitlines()[0])
    assert line["url"] == "/v1/completions"
    assert line["method"] == "POST"


def write(path: Path, *requests: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in requests) + "\n\n")
    return path


def request(custom_id: str = "a", url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "url": url, "body": {"model": "m", **body}}


def test_text_and_chat_prompts_are_tokenised(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        request("a", prompt="one three fifteen"),
        request("b", "/v1/chat/completions", messages=[{"role": "user", "content": "hey"}], max_completion_tokens=7),
        request("c", prompt=[5, 6], temperature=None, stop="end"),
    )
    a, b, c = read_requests(path, Words)
    assert a.prompt == [3, 5, 7]
    assert a.max_tokens == 16
    assert b.prompt == [0, 3]
    assert b.max_tokens == 7
    assert c.prompt == [5, 6]
    assert c.params.stop == ("end",)
    assert c.params.temperature == 1.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2"),
        ("[1]", "line 2: not an object"),
        ({"custom_id": "b", "body": 3}, "line 2: not an object with a `body`"),
        (request("a", prompt=[1]), "line 2: custom_id 'a' stands twice"),
        (request("", prompt=[1]), "line 2: `custom_id`"),
        (request("b", "/v1/embeddings", prompt=[1]), "line 2: url '/v1/embeddings'"),
        (request("b", prompt=[]), "line 2: `prompt`"),
        (request("b", prompt=["x", "y"]), "line 2: `prompt`"),
        (request("b", prompt=[True]), "line 2: `prompt`"),
        (request("b", prompt=[-1]), "line 2: `prompt`"),
        (request("b", "/v1/chat/completions", messages=[]), "line 2: `messages`"),
        (request("b", prompt=[1], max_tokens=0), "line 2: max_tokens must be at least 1"),
        (request("b", prompt=[1], temperature="hot"), "line 2: .*float"),
        (request("b", prompt=[1], response_format={}), "line 2: field 'response_format' is not supported"),
    ],
)
def test_a_wrong_line_is_named(bad: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", request("a", prompt=[1]), bad)
    with pytest.raises(ConfigError, match=message) as raised:
        read_requests(path, Words)
    assert "\n" not in str(raised.value)


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_requests(write(tmp_path / "e.jsonl", ""), Words)
    with pytest.raises(ConfigError, match="cannot read"):
        read_requests(tmp_path / "missing", Words)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_requests(tmp_path / "b.jsonl", Words)


def test_forced_lengths_are_greedy_and_full() -> None:
    (item,) = forced_lengths(items([([1], 9)], temperature=0.9, stop=("x",)))
    assert item.params.greedy
    assert item.params.ignore_eos
    assert item.max_tokens == 9
    assert item.params.stop == ()


def test_bodies_become_sampling_parameters() -> None:
    params = params_of({"max_tokens": 5, "top_p": 0.9, "seed": 3, "logit_bias": {"7": -1}, "stream": True, "n": None})
    assert (params.max_tokens, params.top_p, params.seed, params.logit_bias) == (5, 0.9, 3, {7: -1.0})
