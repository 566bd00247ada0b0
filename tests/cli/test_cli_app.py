import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import environment, headrace

from headrace.bench.workload import mixed
from headrace.cli import main
from headrace.core.config import Config
from headrace.core.errors import ConfigError
from headrace.core.settings import settings_of
from headrace.version import __version__


def test_version_and_help(tmp_path: Path) -> None:
    assert headrace("--version", home=tmp_path).stdout == f"headrace {__version__}\n"
    help = headrace("--help", home=tmp_path)
    assert help.returncode == 0
    for command in ("serve", "chat", "models", "bench"):
        assert command in help.stdout


def test_serve_has_a_flag_for_every_setting(tmp_path: Path) -> None:
    help = headrace("serve", "--help", home=tmp_path).stdout
    for setting in settings_of(Config):
        assert setting.flag in help
        assert setting.env in help


def test_help_cuts_no_name_at_80_columns(tmp_path: Path) -> None:
    words = headrace("serve", "--help", home=tmp_path, COLUMNS="80", TERMINAL_WIDTH="80").stdout
    assert max(map(len, words.splitlines())) <= 80
    found = set(re.findall(r"[\w-]+", words))
    for setting in settings_of(Config):
        assert {setting.flag, setting.env} <= found


def test_help_names_the_extra_to_install(tmp_path: Path) -> None:
    for command in ("throughput", "serve"):
        assert "headrace[plot]" in headrace("bench", command, "--help", home=tmp_path).stdout


WRONG: list[tuple[list[str], dict[str, str], str]] = [
    (["serve", "--max-model-length", "4"], {}, "unknown flag --max-model-length (did you mean --max-model-len?)"),
    (["srve"], {}, "Did you mean 'serve', 'store'? See headrace --help"),
    (["serve", "one", "two"], {}, "(two); see headrace serve --help"),
    (["serve", "--port", "abc"], {}, "--port: 'abc' is not a whole number\n"),
    (["serve", "--itl-target", "150"], {}, "150 has no unit; write 150ms or 150s"),
    (["serve", "--enforce-eager"], {}, "unknown flag --enforce-eager; use --no-cuda-graphs"),
    (["serve", "--max-num-seqs", "0", "/nowhere"], {}, "--max-num-seqs must be at least 1, got 0"),
    (["serve", "--port", "99999"], {}, "port 99999 is above 65535; choose another --port"),
    (["serve", "--page-size", "17"], {}, "--page-size: 17 is not one of 8, 16, 32, 64"),
    (["serve", "--kv-memory", "lots"], {}, "--kv-memory: 'lots' is not a size such as 2GiB"),
    (["serve", "--itl-target", "fast"], {}, "--itl-target: 'fast' is not a duration such as 150ms"),
    (["serve", "one", "--model", "two"], {}, "two models given: one and --model two"),
    (["serve", "--config", "/nowhere.toml"], {}, "cannot read configuration file /nowhere.toml"),
    (["serve"], {"HEADRACE_PROT": "1"}, "unknown environment variable HEADRACE_PROT (did you mean HEADRACE_PORT?)"),
    (["bench", "throughput"], {"HEADRACE_PORT": "x"}, "HEADRACE_PORT: 'x' is not a whole number"),
    (["bench", "throughput", "--requests", "x", "--model", "/nowhere"], {}, "no such file or folder: /nowhere"),
    (["bench", "throughput", "--peer", "nobody"], {}, "--peer: 'nobody' is not one of transformers"),
    (["bench", "throughput", "--rounds", "0"], {}, "--rounds"),
    (["bench", "serve", "--rate", "0", "--url", "http://127.0.0.1:9"], {}, "--rate must be above 0"),
    (["bench", "serve", "--requests", "a", "--trace", "b"], {}, "exclude each other"),
    (["bench", "serve", "--rate", "1", "--plot", "picture.xyz"], {}, "end it with .png"),
    (["bench", "parity", "--families", "lama"], {}, "'lama' is not one of"),
    (["bench", "calibrate", "--dtype", "int4"], {}, "dtype 'int4' cannot be calibrated"),
    (["bench", "attention", "--kv-dtype", "int4"], {}, "--kv-dtype: 'int4'"),
    (["models", "path", "nobody/nothing"], {}, "headrace models pull nobody/nothing"),
    (["models", "rm", "nothing"], {}, "no model 'nothing' in the cache"),
    (["models", "pull", "./nowhere.gguf"], {}, "no such file or folder: ./nowhere.gguf"),
]


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize(("words", "variables", "message"), WRONG, ids=lambda v: " ".join(v) if type(v) is list else "")
def test_an_error_is_one_line_with_the_way_out(
    words: list[str],
    variables: dict[str, str],
    message: str,
    clean: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        clean.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_an_error_reaches_the_shell(tmp_path: Path) -> None:
    done = headrace("serve", "--page-size", "17", home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "headrace: error: --page-size: 17 is not one of 8, 16, 32, 64\n"
    assert headrace("models", "rm", "nothing", home=tmp_path).returncode == 1


def test_an_unforeseen_error_is_one_line_too(clean: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first\nsecond")

    clean.setattr("headrace.model.hub.list_models", fail)
    with pytest.raises(SystemExit) as ended:
        main(["models", "list"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "headrace: error: RuntimeError: first second (--debug shows where)\n"


@pytest.mark.parametrize(
    "words", [["--debug", "serve", "--page-size", "17"], ["serve", "--page-size", "17", "--debug"]]
)
def test_debug_shows_where(words: list[str], clean: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--page-size: 17 is not one of"):
        main(words)


def test_models_of_an_empty_cache(tmp_path: Path) -> None:
    hub = {"HF_HOME": str(tmp_path / "hf")}
    assert "models pull" in headrace("models", "list", home=tmp_path, **hub).stdout
    done = headrace("models", "list", "--json", home=tmp_path, **hub)
    assert json.loads(done.stdout.splitlines()[-1]) == {"models": []}


def test_the_mixed_workload_can_be_written_for_other_programs(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    words = ["--write-requests", str(file), "--workload-seed", "5", "--json"]
    done = headrace("bench", "throughput", *words, home=tmp_path)
    assert json.loads(done.stdout.splitlines()[-1]) == {"file": str(file), "requests": 64}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["body"]["prompt"] for line in lines] == [item.prompt for item in mixed(5)]


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        ["serve", "--help"],
        ["models", "list"],
        ["bench", "serve", "--help"],
        ["serve", "--x"],
    ],
    ids=" ".join,
)
def test_commands_that_need_no_model_import_neither_torch_nor_transformers(words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom headrace.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numba', 'matplotlib', 'fastapi'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    run = [sys.executable, "-c", code, *words]
    done = subprocess.run(run, capture_output=True, text=True, env=environment(tmp_path), timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_start_up_takes_less_than_half_a_second(tmp_path: Path) -> None:
    """Processor time, which a busy machine stretches less than the clock's; the best of three."""
    times = []
    for _ in range(3):
        before = os.times()
        headrace("models", "list", home=tmp_path, HF_HOME=str(tmp_path))
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.5


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "headrace.cli", "serve", "--help"]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(30)
