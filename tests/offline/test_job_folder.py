"""Folders of jobs: who runs one, what they hold, and what is left of those that were never made."""

import os
import threading
import time
from pathlib import Path

import pytest
from echo_endpoint import line, new_job

from headrace.offline.jobs.errors import JobBusy
from headrace.offline.jobs.folder import create_job, held_bytes
from headrace.offline.jobs.spec import JobSpec, new_job_id


def server_job(home: Path, source: Path | None = None) -> Path:
    job = new_job_id()
    folder = home / job
    paths = {"input": str(folder / "input.jsonl"), "output": str(home / "o"), "errors": str(home / "e")}
    return create_job(JobSpec(id=job, origin="server", created_at=0.0, **paths), home, source).path


def test_looking_who_runs_a_job_disturbs_nobody_who_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_job(tmp_path, [line("a", "b")])
    looking = threading.Event()
    close = os.close

    def slowly(descriptor: int) -> None:
        looking.set()
        time.sleep(0.02)
        close(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", slowly)
        looker = threading.Thread(target=lambda: folder.running)
        looker.start()
        assert looking.wait(10)
        with folder.lock():
            assert folder.running
        looker.join()
    assert not folder.running


def test_of_many_that_begin_one_runs(tmp_path: Path) -> None:
    folder = new_job(tmp_path, [line("a", "b")])
    outcomes: list[bool] = []
    ready, over = threading.Barrier(4), threading.Barrier(4)

    def begin() -> None:
        ready.wait()
        try:
            with folder.lock():
                outcomes.append(True)
                over.wait()
        except JobBusy:
            outcomes.append(False)
            over.wait()

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert outcomes.count(True) == 1


def test_inputs_whose_files_are_gone_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "file"
    source.write_bytes(b"x" * 100)
    home = tmp_path / "jobs"
    assert held_bytes(home) == 0
    folder = server_job(home, source)
    assert held_bytes(home) == 0  # the file itself counts
    source.unlink()
    assert held_bytes(home) == 100
    (folder / "input.jsonl").unlink()
    assert held_bytes(home) == 0


@pytest.mark.parametrize("age", [60.0, 2 * 86400.0])
def test_what_was_never_made_goes_in_time(tmp_path: Path, age: float) -> None:
    left = tmp_path / ".new-abc"
    left.mkdir()
    (left / "journal.sqlite").write_bytes(b"x")
    os.utime(left, (time.time() - age, time.time() - age))
    server_job(tmp_path)
    assert left.exists() == (age == 60.0)
