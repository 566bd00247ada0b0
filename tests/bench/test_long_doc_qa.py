import json
from pathlib import Path

import pytest

from headrace.bench.local_engine import tokenizer_of
from headrace.bench.long_doc_prompts import new_prompts, question_batch, random_windows, read_windows
from headrace.cli import main
from headrace.core.errors import ConfigError
from homes import fresh_home


def write(path: Path, *documents: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_windows_are_spread_over_the_documents(tiny: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tiny)
    text = " ".join(str(number) for number in range(400))
    asked = [{"Q": "one?"}, {"Q": "two?"}, {"Q": "three?"}]
    file = write(tmp_path / "d", {"input": text, "qa_pairs": str(asked)}, {"input": text[::-1], "qa_pairs": asked})
    windows = read_windows(file, tokenizer, 5, 100, 2)
    assert len(windows) == 5
    assert len({tuple(window.tokens) for window in windows}) == 5
    assert all(len(window.tokens) == 100 and len(window.questions) == 2 for window in windows)
    assert windows[0].tokens == tokenizer.encode(text)[:100]
    assert windows[0].questions[1] == tokenizer.encode("\n\nQuestion: two?\nAnswer:")
    assert windows[1].questions[0] == tokenizer.encode("\n\nQuestion: three?\nAnswer:")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"input": "x", "qa_pairs": "[{'Q': 'a'}"}, "line 1"),
        ({"input": "x"}, "line 1"),
        ({"input": "x", "qa_pairs": []}, "no question"),
        ({"input": "short", "qa_pairs": [{"Q": "a"}]}, "no document of 100 tokens"),
    ],
)
def test_files_that_do_not_do(tiny: Path, tmp_path: Path, line: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_windows(write(tmp_path / "d", line), tokenizer_of(tiny), 2, 100, 1)
    with pytest.raises(ConfigError, match="cannot read"):
        read_windows(tmp_path / "none", tokenizer_of(tiny), 2, 100, 1)


def test_all_windows_come_between_two_questions_about_one() -> None:
    windows = random_windows(4, 20, 2, 1000)
    new = new_prompts(2, 10, 1000, "a")
    assert new != new_prompts(2, 10, 1000, "b")
    prompts = [item.prompt for item in question_batch(windows, new, 3)]
    assert len(prompts) == 10
    assert [prompt for prompt in prompts if prompt in new] == new
    old = [prompt[:20] for prompt in prompts if prompt not in new]
    assert old == [window.tokens for window in windows] * 2


def test_the_command_compares_policies(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(fresh_home(tmp_path / "home")))
    work = tmp_path / "work"
    command = [
        "bench", "long-doc-qa", str(tiny), "--windows", "5", "--window", "200", "--questions", "2", "--outputs", "3",
        "--new", "1", "--new-tokens", "40", "--chunk-tokens", "16", "--pool-windows", "1.6", "--work-dir", str(work),
        "--rounds", "1", "--json",
    ]  # fmt: skip
    run(*command, "--fast-rate", "4")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    policies = found["policies"]
    assert list(policies) == ["sequential", "batched", "deferred", "static", "completion", "overlap", "recompute"]
    assert found["of"] == "recompute over sequential"
    assert found["fast_mb_per_s"] == 4
    assert all(one["differing_outputs"] == 0 for one in policies.values())
    assert all(one["written_mb"] >= 0 and one["wall_s"] > 0 for one in policies.values())
    assert policies["sequential"]["overlap_s"] <= 0.2 * policies["sequential"]["wall_s"]
    files = sorted(path for path in work.rglob("*") if path.is_file())
    run(*command, "--policy", "sequential", "--policy", "overlap", "--no-throttle")
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["policies"]["overlap"]["differing_outputs"] == 0
    assert sorted(path for path in work.rglob("*") if path.is_file()) == files, "filled once, and what is new deleted"
    run(*command, "--policy", "best", code=2)


def run(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == code
