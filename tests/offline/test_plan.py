"""`headrace plan`: what is read, what is told, and that the reordered file is the file."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from cli_runs import headrace

from headrace.cli.app import main
from headrace.core.errors import ConfigError, HeadraceError
from headrace.offline.jobs.errors import WrongFile
from headrace.offline.jobs.lines import MAX_LINE
from headrace.offline.plan_input import read_plan_input
from headrace.offline.plan_lengths import expected_lengths
from headrace.offline.planning.admission import ORDERS

KEYS = {"requests", "prompt_tokens", "sharing", "sharing_kept", "density", "orders"}


def line(name: str, prompt: list[int], limit: int, **more: Any) -> str:
    body = {"model": "default", "prompt": prompt, "max_tokens": limit, **more}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    stream = random.Random(0)
    documents = [[stream.randrange(1000) for _ in range(128)] for _ in range(4)]
    rows = [line(f"d{i}", [*documents[i % 4], i], 8) for i in range(24)]
    rows += [line(f"s{i}", [2000 + i, i, i], 64) for i in range(24)]
    stream.shuffle(rows)
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def no_tokenizer() -> Any:
    raise AssertionError("prompts of token ids need no tokenizer")


def test_a_plan_for_an_accelerator(batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "out.jsonl", tmp_path / "plan.png"
    common = ["--model", "llama-3-8b", "--device", "A100-80G", "--kv-tokens", "2000"]
    with pytest.raises(SystemExit) as end:
        main(["plan", str(batch), *common, "-o", str(output), "--plot", str(picture), "--json"])
    assert end.value.code == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told.keys() >= KEYS
    assert told["requests"] == 48
    assert told["prompt_tokens"] == 24 * 129 + 24 * 3
    assert told["sharing"] == pytest.approx(20 * 128 / told["prompt_tokens"], abs=1e-4)
    assert set(told["orders"]) == set(ORDERS)
    for order in told["orders"].values():
        assert 0 < order["share_of_optimum"] <= 1
        assert order["predicted_s"] == pytest.approx(told["optimum_s"] / order["share_of_optimum"], rel=0.02)
    assert told["orders"]["dfs"]["sharing_kept"] == 1
    assert 0.9 <= told["sharing_kept"] <= 1
    assert told["device_overlaps"]
    assert [group["requests"] for group in told["groups"]] == [24, 24]
    assert sum(sum(group["density_histogram"]) for group in told["groups"]) == 48
    assert sorted(output.read_text().splitlines()) == sorted(batch.read_text().splitlines())
    assert output.read_text() != batch.read_text()
    assert picture.stat().st_size > 1000
    assert output.stat().st_mode == batch.stat().st_mode
    before = output.read_text()
    with pytest.raises(SystemExit) as end:
        main(["plan", str(batch), *common, "--seed", "7", "-o", str(output)])
    assert end.value.code == 2
    assert output.read_text() == before


def test_a_plan_of_the_command_line_speaks_plainly(batch: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 3000,
    }  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    done = headrace(
        "plan", str(batch), "--device", "cpu", "--threads", "2", "--model", str(tmp_path / "model"), home=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "times add up" in done.stdout
    assert "was not measured" in done.stdout


def test_wrong_lines_are_told_and_kept(batch: Path, tmp_path: Path) -> None:
    wrong = [
        b"not json", b'"text"', b'{"custom_id": "x"}', b"\xff\xfe", line("d0", [1], 4).encode(),
        line("z", [], 4).encode(), line("y", [1], 0).encode(), line("w", [-1], 4).encode(),
        line("v", [2**40], 4).encode(), line("u", [1], 4).replace("/v1/completions", "/v1/embeddings").encode(),
    ]  # fmt: skip
    batch.write_bytes(batch.read_bytes() + b"\n".join([*wrong, b"", b"  "]))
    given = read_plan_input(batch, no_tokenizer)
    assert len(given.ids) == 48
    assert [number for number, _ in given.errors] == list(range(49, 49 + len(wrong)))
    lines = batch.read_bytes()
    assert [lines[a:b].strip() for a, b in given.bad] == wrong
    assert all(json.loads(lines[a:b])["custom_id"] == name for a, b, name in zip(given.begins, given.ends, given.ids))


def test_lines_nested_too_deeply_are_wrong_lines(batch: Path) -> None:
    deep = [
        b'{"custom_id": "a", "body": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        line("b", [1], 4).replace("[1]", "[" * 100_000 + "]" * 100_000).encode(),
        b"[" * 100_000,
    ]
    batch.write_bytes(b"\n".join([*deep, b""]) + batch.read_bytes())
    given = read_plan_input(batch, no_tokenizer)
    assert len(given.ids) == 48
    assert [number for number, _ in given.errors] == [1, 2, 3]
    assert "nested too deeply" in given.errors[0][1]


def test_a_line_that_is_too_long_is_a_wrong_line(batch: Path) -> None:
    batch.write_bytes(b'{"custom_id": "' + b"a" * MAX_LINE + b'"}\n' + batch.read_bytes())
    given = read_plan_input(batch, no_tokenizer)
    assert len(given.ids) == 48
    assert given.errors[0][0] == 1
    assert "more than 16,777,216" in given.errors[0][1]


def test_a_mark_at_the_start_is_no_part_of_the_first_line(batch: Path) -> None:
    plain = batch.read_bytes()
    batch.write_bytes(b"\xef\xbb\xbf" + plain)
    given = read_plan_input(batch, no_tokenizer)
    assert (len(given.ids), given.errors) == (48, [])
    lines = batch.read_bytes()
    assert b"".join(lines[a:b] for a, b in zip(given.begins, given.ends)) == plain


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (gzip.compress(b"{}"), "gzip"), (b"PK\x00\x01", "binary"), (b"hello\n", "no request")],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(HeadraceError, match=message):
        read_plan_input(path, no_tokenizer)
    with pytest.raises(WrongFile, match="not there"):
        read_plan_input(tmp_path / "missing.jsonl", no_tokenizer)


def test_lengths_of_an_earlier_run_are_expected_again(batch: Path, tmp_path: Path) -> None:
    given = read_plan_input(batch, no_tokenizer)
    assert expected_lengths(given, None, 0.5).tolist() == (given.requests.max_tokens // 2).tolist()
    results = tmp_path / "results.jsonl"
    usage = {"custom_id": "s3", "response": {"body": {"usage": {"completion_tokens": 40}}}}
    failed = {"custom_id": "s4", "response": None, "error": {"code": "x"}}
    results.write_text("\n".join(map(json.dumps, [usage, failed, {"custom_id": "d1", "output_tokens": 99}])))
    expected = dict(zip(given.ids, expected_lengths(given, results, 1.0).tolist()))
    assert (expected["s3"], expected["s4"], expected["d1"], expected["d2"]) == (40, 64, 8, 8)
    results.write_text('{"custom_id": "other", "output_tokens": 1}')
    with pytest.raises(ConfigError, match="no result"):
        expected_lengths(given, results, 1.0)


def test_a_request_that_cannot_fit_is_named(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", str(batch), "--model", "llama-3-8b", "--device", "H100", "--kv-tokens", "100"])
    assert end.value.code == 2
    assert "--kv-tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["plan", str(batch), "--device", "TPU"])
    assert end.value.code == 2
