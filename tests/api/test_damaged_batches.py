"""A batch whose journal is damaged harms no other."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_files import CHAT, chat_line, jsonl, model_folder, upload
from openai import OpenAI
from parrot import STALL
from served import Served, serve_parrot

from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.folder import JobFolder

ASKED: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose first batch never ends, so that nobody has the journals of the later ones open."""
    home = tmp_path_factory.mktemp("home")
    with serve_parrot(home=home, path=model_folder(home / "model")) as server:
        server.engine.step = STALL
        create(server.client())
        yield server


def create(client: OpenAI) -> str:
    return client.batches.create(input_file_id=upload(client, jsonl(chat_line("a", "la"))), **ASKED).id


def damage(folder: Path, content: bytes) -> None:
    for path in folder.glob("journal.sqlite-*"):
        path.unlink()
    journal = folder / "journal.sqlite"
    journal.write_bytes(journal.read_bytes()[:100] if content == b"cut" else content)


@pytest.mark.parametrize("content", [b"", b"\x5a" * 8192, b"cut"])
def test_a_damaged_journal_harms_no_other_batch(served: Served, content: bytes) -> None:
    client = served.client()
    good, bad = create(client), create(client)
    damage(served.state.jobs / bad, content)
    listed = [each.id for each in client.batches.list(limit=100)]
    assert good in listed
    assert bad not in listed
    with served.http() as http:
        for method, path in (("GET", bad), ("POST", f"{bad}/cancel")):
            answer = http.request(method, f"/v1/batches/{path}")
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert error["code"] == "batch_unreadable"
            assert bad in error["message"]
            assert str(served.state.jobs) not in error["message"]
    assert create(client) in [each.id for each in client.batches.list(limit=100)]  # though a damaged one waits


def test_a_full_disk_is_no_damage(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = create(served.client())
    full = sqlite3.OperationalError("disk I/O error")
    full.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE  # what opening a journal says on a tmpfs without room

    def journal(folder: JobFolder) -> None:
        raise JobError(f"the journal of {folder.id} cannot be read: {full}") from full

    monkeypatch.setattr(JobFolder, "journal", journal)
    with served.http() as http:
        for path in ("/v1/batches", f"/v1/batches/{batch}"):
            answer = http.get(path)
            assert answer.status_code == 507
            assert answer.json()["error"]["code"] == "disk_full"
