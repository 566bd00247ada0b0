"""What deleted files and failed uploads take on the disk still."""

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest
from batch_files import chat_line, ended, jsonl, model_folder, stalled, start
from served import serve_parrot

from headrace.api.file_store import FileStore
from headrace.core.config import ServerConfig

MIB = 1 << 20


def test_an_input_counts_until_its_batch_has_ended(tmp_path: Path) -> None:
    config = ServerConfig(max_file_bytes=2 * MIB, max_files_bytes=2 * MIB)
    content = jsonl(chat_line("a", "la", user="u" * (MIB + 500_000)))
    with serve_parrot(config, home=tmp_path, path=model_folder(tmp_path / "model")) as served:
        client = served.client()
        form: Any = {"files": {"file": ("b", content)}, "data": {"purpose": "batch"}}
        with served.http() as http:
            with stalled(served, client) as running:
                batch = start(client, content, completion_window="48h")
                assert client.files.delete(batch.input_file_id).deleted
                for _ in range(2):
                    assert http.post("/v1/files", **form).status_code == 413
            client.batches.cancel(running.id)
            assert ended(client, batch).status == "completed"
            assert http.post("/v1/files", **form).status_code == 200


def test_a_deleted_file_that_a_batch_has_frees_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", 1000)
    path = store.begin()
    path.write_bytes(b"x" * 600)
    made = store.publish(path, "a", "batch")
    store.end(path)
    other = store.begin()
    (tmp_path / "input").hardlink_to(store.data_path(made.id))
    store.delete(made.id)
    with pytest.raises(Exception, match="1000 bytes"):
        store.take(other, 500)


@pytest.mark.parametrize("what", ["mkstemp", "replace"])
def test_a_file_that_cannot_be_described_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = FileStore(tmp_path, 1000)
    path = store.begin()
    path.write_bytes(b"x")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        if what == "mkstemp":
            patched.setattr(tempfile, "mkstemp", full)
        else:
            patched.setattr("headrace.api.file_store.os.replace", full)
        with pytest.raises(OSError, match="no space"):
            store.publish(path, "a", "batch")
    store.end(path)
    assert not list(tmp_path.iterdir())
