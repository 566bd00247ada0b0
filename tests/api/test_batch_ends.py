"""Batches that are ended without being run: by a command, by their window, or by a server that died at the end."""

import asyncio
import os
import time
from pathlib import Path

import openai
import pytest
from batch_files import LINES, chat_line, ended, jsonl, lines_of, model_folder, stalled, start
from served import serve_parrot

from headrace.api import batch_service
from headrace.offline.jobs.cancel import cancel_job
from headrace.offline.jobs.folder import JobFolder, open_job

LINE = jsonl(chat_line("a", "la"))


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_service, "LOOK_S", 0.05)


def test_a_command_cancels_a_batch_and_the_next_server_ends_it(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    with serve_parrot(home=tmp_path, path=path) as first, stalled(first, first.client()) as batch:
        pass
    folder = open_job(batch.id, tmp_path / "jobs")
    assert asyncio.run(cancel_job(folder)).status == "cancelling"
    assert not folder.state().final
    with serve_parrot(home=tmp_path, path=path) as second:
        client = second.client()
        batch = ended(client, client.batches.retrieve(batch.id))
        assert batch.status == "cancelled"
        results = lines_of(client, batch.output_file_id) + lines_of(client, batch.error_file_id)
    assert len(results) == len(LINES)
    assert asyncio.run(cancel_job(folder)).status == "cancelled"


def test_a_command_cancels_a_batch_that_waits(tmp_path: Path) -> None:
    with serve_parrot(home=tmp_path, path=model_folder(tmp_path / "model")) as served:
        client = served.client()
        with stalled(served, client):
            batch = start(client, LINE, completion_window="48h")
            assert asyncio.run(cancel_job(open_job(batch.id, tmp_path / "jobs"))).status == "cancelling"
            batch = ended(client, batch, 5)
            assert batch.status == "cancelled"
            assert len(lines_of(client, batch.error_file_id)) == 1


@pytest.mark.parametrize("end", ["expired", "cancelled"])
def test_a_batch_of_another_model_is_ended_but_not_run(tmp_path: Path, end: str) -> None:
    path = model_folder(tmp_path / "model")
    window = {"completion_window": "1h"}
    with serve_parrot(home=tmp_path, path=path) as first, stalled(first, first.client(), **window) as batch:
        pass
    with serve_parrot(home=tmp_path, path=path, fingerprint="0" * 64) as other:
        client = other.client()
        own = ended(client, start(client, LINE))
        assert own.status == "completed"
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert other.state.metrics.batches == 0
        if end == "expired":
            other.clock.skip(3601)
        else:
            asyncio.run(cancel_job(open_job(batch.id, tmp_path / "jobs")))
        batch = ended(client, client.batches.retrieve(batch.id), 5)
        assert batch.status == end
        results = lines_of(client, batch.output_file_id) + lines_of(client, batch.error_file_id)
        assert len(results) == len(LINES)
        assert len(other.engine.seen) == 1


def test_results_that_nobody_made_known_are_found(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    with serve_parrot(home=tmp_path, path=path) as first:
        client = first.client()
        batch, deleted = (ended(client, start(client, LINE)) for _ in range(2))
        assert batch.output_file_id is not None
        assert deleted.output_file_id is not None
        client.files.delete(deleted.output_file_id)
        (first.state.files.folder / f"{batch.output_file_id}.json").unlink()  # as an older `batch cancel` left it
    with serve_parrot(home=tmp_path, path=path) as second:
        client = second.client()
        assert len(lines_of(client, batch.output_file_id)) == 1
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(deleted.output_file_id)


def test_content_without_a_description_goes_but_not_that_of_batches(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    with serve_parrot(home=tmp_path, path=path) as first, stalled(first, first.client()) as batch:
        files = first.state.files
    output = Path(JobFolder(tmp_path / "jobs" / batch.id).spec().output)
    old, fresh = (files.data_path("file-" + digit * 32) for digit in "01")
    for each in (old, fresh):
        each.write_bytes(b"of an upload whose server died")
    for each in (old, output):
        day_before = time.time() - 2 * 86400
        os.utime(each, (day_before, day_before))
    with serve_parrot(home=tmp_path, path=path, fingerprint="0" * 64):
        assert not old.exists()
        assert fresh.exists()
        assert output.exists()


def test_the_model_is_told(tmp_path: Path) -> None:
    with serve_parrot(home=tmp_path, path=model_folder(tmp_path / "model")) as served:
        assert start(served.client(), LINE).model == served.state.model == "parrot"
