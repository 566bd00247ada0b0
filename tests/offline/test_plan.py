"""`headrace plan`: what is read, what is told, and that the reordered file is the file."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_chat_model
from cli_runs import headrace

from headrace.cli.app import main
from headrace.cli.plan_endpoint import PlanEndpoint
from headrace.core.errors import ConfigError, HeadraceError
from headrace.front.tokenizer import Tokenizer
from headrace.offline.jobs.errors import WrongFile
from headrace.offline.jobs.lines import MAX_LINE
from headrace.offline.model_limits import ModelLimits
from headrace.offline.plan_input import MOST_ERRORS, read_plan_input
from headrace.offline.plan_lengths import expected_lengths
from headrace.offline.planning.admission import ORDERS

KEYS = {"requests", "prompt_tokens", "sharing", "sharing_kept", "density", "orders"}


def line(name: str, prompt: Any, limit: int, **more: Any) -> str:
    body = {"model": "default", "prompt": prompt, "max_tokens": limit, **more}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model.make(tmp_path_factory.mktemp("models") / "tiny", vocab_size=3000)


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


def nobody() -> Any:
    raise AssertionError("plain bodies are understood without the model's files")


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


def test_wrong_lines_are_counted_and_the_rest_is_planned(batch: Path, model: Path) -> None:
    wrong = [b"not json", b'{"custom_id": "x"}', line("d0", [1], 4).encode(), line("z", [], 4).encode()]
    batch.write_bytes(batch.read_bytes() + b"\n".join([*wrong, b"", b"  "]))
    given = read_plan_input(batch, lambda: PlanEndpoint(lambda: model, "tiny", ModelLimits()))
    assert len(given.ids) == 48
    assert [(error.line, error.custom_id, error.code) for error in given.errors] == [
        (49, None, "invalid_json_line"), (50, "x", "invalid_method"), (51, "d0", "duplicate_custom_id"),
        (52, "z", None),
    ]  # fmt: skip
    lines = batch.read_bytes()
    assert all(json.loads(lines[a:b])["custom_id"] == name for a, b, name in zip(given.begins, given.ends, given.ids))


def test_a_hundred_errors_are_kept_and_all_are_counted(batch: Path) -> None:
    batch.write_bytes(b"nonsense\n" * 300 + batch.read_bytes())
    given = read_plan_input(batch, nobody)
    assert (len(given.ids), given.wrong) == (48, 300)
    assert [error.line for error in given.errors] == list(range(1, MOST_ERRORS + 1))


def test_texts_stand_among_token_ids_in_the_order_of_the_file(tmp_path: Path, model: Path) -> None:
    prompts: list[Any] = [f"text {i}" if i % 3 else [i, i + 1] for i in range(5000)]
    prompts[7], prompts[8] = "", "caf\u00e9"
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line(f"r{i}", prompt, 4) for i, prompt in enumerate(prompts)))
    given = read_plan_input(path, lambda: PlanEndpoint(lambda: model, "tiny", ModelLimits()))
    assert [error.line for error in given.errors] == [8]
    assert given.ids == [f"r{i}" for i in range(5000) if i != 7]
    tokenizer = Tokenizer.load(model)
    expected = [p if isinstance(p, list) else tokenizer.encode(p) for i, p in enumerate(prompts) if i != 7]
    assert [given.requests.prompt(i).tolist() for i in range(len(given.ids))] == expected
    assert given.tokenize_s > 0
    assert given.read_s > 0


def test_lines_nested_too_deeply_are_wrong_lines(batch: Path) -> None:
    deep = [
        b'{"custom_id": "a", "body": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        line("b", [1], 4).replace("[1]", "[" * 100_000 + "]" * 100_000).encode(),
        b"[" * 100_000,
    ]
    batch.write_bytes(b"\n".join([*deep, b""]) + batch.read_bytes())
    given = read_plan_input(batch, nobody)
    assert len(given.ids) == 48
    assert [error.line for error in given.errors] == [1, 2, 3]
    assert all("nested too deeply" in error.message for error in given.errors[:2])


def test_a_line_that_is_too_long_is_a_wrong_line(batch: Path) -> None:
    batch.write_bytes(b'{"custom_id": "' + b"a" * MAX_LINE + b'"}\n' + batch.read_bytes())
    given = read_plan_input(batch, nobody)
    assert len(given.ids) == 48
    assert [(error.line, error.code) for error in given.errors] == [(1, "line_too_long")]


def test_a_mark_at_the_start_is_no_part_of_the_first_line(batch: Path) -> None:
    plain = batch.read_bytes()
    batch.write_bytes(b"\xef\xbb\xbf" + plain)
    given = read_plan_input(batch, nobody)
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
        read_plan_input(path, nobody)
    with pytest.raises(WrongFile, match="not there"):
        read_plan_input(tmp_path / "missing.jsonl", nobody)


def test_lengths_of_an_earlier_run_are_expected_again(batch: Path, tmp_path: Path) -> None:
    given = read_plan_input(batch, nobody)
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


def test_lines_that_cannot_fit_are_wrong_lines(
    batch: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    common = ("--model", str(model), "--device", "H100", "--kv-tokens", "100")
    with pytest.raises(SystemExit) as end:
        main(["plan", str(batch), *common, "-o", str(output), "--json"])
    assert end.value.code == 0
    said, warned = capsys.readouterr()
    told = json.loads(said.splitlines()[-1])
    assert (told["requests"], told["bad_lines"], len(told["errors"])) == (24, 24, 24)
    first = told["errors"][0]
    assert first.keys() == {"line", "custom_id", "code", "message", "param"}
    assert (first["custom_id"][0], first["code"], first["param"]) == ("d", "context_length_exceeded", "prompt")
    assert f"24 of 48 lines are wrong: not planned and left out of {output}" in warned
    assert {json.loads(row)["custom_id"][0] for row in output.read_text().splitlines()} == {"s"}
    with pytest.raises(SystemExit) as end:
        main(["plan", str(batch), *common[:-1], "3"])
    assert end.value.code == 1
    assert "no request that can be planned; line 1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["plan", str(batch), "--device", "TPU"])
    assert end.value.code == 2


def test_the_sequences_of_a_line_count_as_far_as_they_fit(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch.write_text(line("many", [1, 2, 3], 100, n=50) + "\n" + batch.read_text())
    with pytest.raises(SystemExit) as end:
        main(["plan", str(batch), "--model", "llama-3-8b", "--device", "H100", "--kv-tokens", "300", "--json"])
    assert end.value.code == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["requests"], told["bad_lines"]) == (49, 0)
    assert told["expected_output_tokens"] == 24 * 8 + 24 * 64 + (300 - 16 - 3)


def test_each_group_is_predicted_by_itself(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", str(batch), "--model", "llama-3-8b", "--device", "A100-80G", "--kv-tokens", "2000"]
    with pytest.raises(SystemExit):
        main([*common, "--json", "--order", "dfs", "--order", "fcfs"])
    groups = json.loads(capsys.readouterr().out.splitlines()[-1])["groups"]
    assert [group["simulated_requests"] for group in groups] == [24, 24]
    for group in groups:
        assert set(group["orders"]) == {"dfs", "fcfs"}
        for one in group["orders"].values():
            assert one["predicted_s"] > 0
            assert 0 < one["share_of_optimum"] <= 1
    batch.write_text("".join(row for row in batch.read_text().splitlines(True) if 'id": "d' in row))
    with pytest.raises(SystemExit):
        main([*common, "--json", "--order", "dfs", "--order", "fcfs"])
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    documents = next(group for group in groups if group["prompt_tokens"] == alone["prompt_tokens"])
    for name, one in alone["orders"].items():
        expected = {key: one[key] for key in ("predicted_s", "share_of_optimum")}
        assert documents["orders"][name] == alone["groups"][0]["orders"][name] == expected
    with pytest.raises(SystemExit):
        main(common)
    tables = capsys.readouterr().out
    assert "Groups by themselves" in tables
    histogram = tables.split("Requests by density")[1].split("Orders")[0]
    assert "all" in histogram
    assert "completion, up to 8" in " ".join(histogram.split())


def test_token_ids_are_understood_where_no_tokenizer_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    rows = [line("ids", [1, 2], 4), line("top_k", [1, 2], 4, top_k=3), line("none", [1], 4, n=0), line("text", "a", 4)]
    rows += [line("pair", [[1, 2], [3]], 4, model="another")]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(rows))
    given = read_plan_input(path, lambda: PlanEndpoint(lambda: tmp_path / "empty", "any", ModelLimits()))
    assert given.ids == ["ids", "top_k", "pair"]
    assert given.requests.max_tokens.tolist() == [4, 4, 8]
    assert [error.custom_id for error in given.errors] == ["none", "text"]
    assert "no tokenizer is at hand" in given.errors[1].message


def test_a_model_with_files_has_a_name_and_one_without_takes_any(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [
        line(f"{name} {extra}", [1, 2], 4, model=name, **extra)
        for name in ("tiny", "gpt")
        for extra in ({}, {"top_k": 3})
    ]
    path.write_text("\n".join(rows))
    named = ModelLimits(names=frozenset(["tiny"]))
    for limits, wrong in ((named, [3, 4]), (ModelLimits(), [])):
        given = read_plan_input(path, lambda limits=limits: PlanEndpoint(lambda: model, "tiny", limits), limits=limits)
        assert [error.line for error in given.errors] == wrong
        assert all(error.code == "model_not_found" for error in given.errors)
