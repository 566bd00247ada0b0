"""Hugging Face ids, against a hub on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, hub_server

SAFE = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
    "consolidated.safetensors": b"twice",
    "README.md": b"text",
}
REPOS = {
    "someone/good": SAFE,
    "someone/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "someone/empty": {"README.md": b"text", "config.json": b"{}"},
    "someone/gated": SAFE,
}
ASK = """
import json, sys
from headrace.core.errors import ModelError
from headrace.model import hub
seen = []
answers = []
for name, revision in json.loads(sys.argv[1]):
    try:
        answers.append(str(hub.resolve(name, revision, lambda report: seen.append((report.done, report.total)))))
    except ModelError as error:
        answers.append(f"ModelError: {error}")
def listed():
    return [[entry.name, str(entry.path), entry.bytes, entry.kind] for entry in hub.list_models()]
before = listed()
freed = hub.remove("someone/good") if "remove" in sys.argv else 0
print(json.dumps({"answers": answers, "seen": seen, "listed": before, "freed": freed, "after": listed()}))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[str]]]:
    with hub_server(REPOS, {"someone/gated"}) as running:
        yield running


def ask(folder: Path, names: list[tuple[str, str | None]], *extra: str, **environment: str) -> dict[str, list[object]]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(names), *extra],
        env={**os.environ, "HEADRACE_HOME": str(folder / "home"), "HF_HOME": str(folder / "hf"), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_ids_are_fetched_refused_listed_and_removed(server: tuple[str, list[str]], tmp_path: Path) -> None:
    address, fetched = server
    names = ["good", "pickled", "empty", "gated", "absent"]
    found = ask(tmp_path, [*((f"someone/{name}", None) for name in names), ("someone/good", "v9")], HF_ENDPOINT=address)
    good, pickled, empty, gated, absent, revision = map(str, found["answers"])
    assert good.endswith(f"snapshots/{COMMIT}")
    assert (Path(good) / "model.safetensors").read_bytes() == SAFE["model.safetensors"]
    assert {path.name for path in Path(good).iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert not {"pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors"} & set(fetched)
    assert "pytorch_model.bin, a pickle" in pickled
    assert "holds no safetensors weights" in empty
    assert "gated" in gated
    assert "someone/absent does not exist" in absent
    assert "someone/good@v9 does not exist" in revision
    assert all("\n" not in str(answer) for answer in found["answers"])
    assert found["listed"] == [["someone/good", good, found["listed"][0][2], "hub"]]
    assert found["seen"]

    offline = ask(tmp_path, [("someone/good", None), ("someone/new", None)], HF_HUB_OFFLINE="1", HF_ENDPOINT=address)
    assert offline["answers"][0] == good
    assert "hub cannot be reached" in str(offline["answers"][1])

    away = ask(tmp_path, [("someone/good", None)], "remove", HF_ENDPOINT="http://127.0.0.1:9")
    assert away["answers"] == [good]  # nothing listens there: the earlier snapshot serves
    assert away["after"] == []
    assert away["freed"]
    assert not Path(good).exists()
    assert list((tmp_path / "hf" / "hub" / "models--someone--pickled" / "snapshots").iterdir())  # the others stay
