"""Results and the journal's commits: what is committed is written, and nothing is committed behind an error."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from echo_endpoint import Echo, line, new_job, results, runner

from headrace.offline.jobs.endpoint import Answer, Asked
from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.journal import Journal
from headrace.offline.jobs.results import Result, ResultFiles

LINES = [line(f"r{i}", "abc") for i in range(100)]


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_flush_that_failed_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_job(tmp_path, LINES)
    journal = folder.journal()
    files = ResultFiles(journal)
    files.add(Result(1, b"{}\n", answered=True))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(OSError, match="No space"):
            files.flush()
    files.add(Result(2, b"{}\n", answered=True))
    with pytest.raises(OSError, match="No space"):
        files.flush()
    files.close()
    journal.close()
    state = folder.state()
    assert (state.completed, state.output_bytes) == (0, 0)


def test_a_job_whose_last_results_found_no_room_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_job(tmp_path, LINES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(JobError, match=r"No space.*resume"):
            asyncio.run(runner(folder, Echo()).run())
    assert folder.state().status == "in_progress"
    state = asyncio.run(runner(folder, Echo()).run())
    assert (state.status, state.completed, len(results(tmp_path)[0])) == ("completed", 100, 100)


class Held(Echo):
    """Answers no more than some lines before a flush is under way."""

    def __init__(self, lines: int, flushing: threading.Event) -> None:
        super().__init__()
        self._lines, self._flushing = lines, flushing

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        if len(self.answered) >= self._lines:
            await asyncio.to_thread(self._flushing.wait, 60)
        return await super().run(asked, share, worker)


def test_no_job_is_said_to_be_finalizing_before_its_last_results_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_job(tmp_path, LINES)
    flushing, followed = threading.Event(), threading.Event()
    fdatasync, flush, commit = os.fdatasync, ResultFiles.flush, Journal.commit
    seen: list[tuple[str, int]] = []

    def wait_for_the_next(descriptor: int) -> None:
        """The first flush lasts until another is asked for: that is, until all lines are answered."""
        fdatasync(descriptor)
        if not flushing.is_set():
            flushing.set()
            assert followed.wait(60)

    def asked(files: ResultFiles) -> None:
        if flushing.is_set():
            followed.set()
        flush(files)

    def watched(journal: Journal, results: Iterable[tuple[int, int, int]] = ()) -> None:
        commit(journal, results)
        seen.append((journal.state.status, len(journal.pending(len(LINES)))))

    monkeypatch.setattr(os, "fdatasync", wait_for_the_next)
    monkeypatch.setattr(ResultFiles, "flush", asked)
    monkeypatch.setattr(Journal, "commit", watched)

    async def run() -> Any:
        echo = Held(20, flushing)
        running = runner(folder, echo, 2)
        task = asyncio.create_task(running.run())
        await echo.after(20)
        running.look()
        return await task

    assert asyncio.run(run()).completed == len(LINES)
    assert len({left for status, left in seen if status == "in_progress"}) > 2  # the slow flush had a part of them
    assert {left for status, left in seen if status == "finalizing"} == {0}


class Interrupted(list[Result]):
    """Another thread flushes while a result is gathered."""

    def __init__(self, flush: Callable[[], None]) -> None:
        super().__init__()
        self.flushing = threading.Thread(target=flush)

    def append(self, result: Result) -> None:
        self.flushing.start()
        self.flushing.join(0.3)
        super().append(result)


def test_a_result_that_is_gathered_during_a_flush_is_not_lost(tmp_path: Path) -> None:
    folder = new_job(tmp_path, LINES)
    journal = folder.journal()
    files = ResultFiles(journal)
    waiting = files._waiting = Interrupted(files.flush)
    files.add(Result(1, b'{"custom_id":"r0"}\n', answered=True))
    waiting.flushing.join()
    files.flush()
    files.close()
    journal.close()
    assert folder.state().completed == len(results(tmp_path)[0]) == 1
