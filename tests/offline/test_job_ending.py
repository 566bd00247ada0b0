"""A job that is cancelled, or whose time is up: when that is seen, what is still done, and what it ends as."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import echo_endpoint
import pytest
from echo_endpoint import Echo, line, new_job, results, runner

from headrace.offline.jobs.cancel import close_job
from headrace.offline.jobs.endpoint import Asked
from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.runner import Stopped
from headrace.offline.jobs.validate import WINDOW_LINES

WINDOW = 3600.0


class Clock:
    """Tells a job that its window is open, or closed."""

    def __init__(self, late: bool = False) -> None:
        self.late = late

    def __call__(self) -> float:
        return time.time() + (WINDOW + 1 if self.late else 0)


class Understanding(Echo):
    """Ends its job while it understands the first lines."""

    def __init__(self, folder: JobFolder, ending: str, clock: Clock) -> None:
        super().__init__()
        self._folder, self._ending, self._clock = folder, ending, clock
        self.understood = 0

    async def prepare(self, url: str, body: bytes) -> Asked:
        self.understood += 1
        if self.understood == 100:
            if self._ending == "cancelled":
                await asyncio.to_thread(self._folder.ask_to_cancel)
            else:
                self._clock.late = True
        return await super().prepare(url, body)


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
def test_a_job_that_ends_while_it_is_validated_neither_understands_nor_waits_any_more(
    tmp_path: Path, ending: str
) -> None:
    lines = [line(f"r{i}", "abc") for i in range(5000)]
    folder, clock = new_job(tmp_path, lines, window=WINDOW), Clock()
    echo = Understanding(folder, ending, clock)
    running = runner(folder, echo, clock=clock, pause=10_000.0)  # hours, if it paused
    state = asyncio.run(asyncio.wait_for(running.run(), 60))
    assert echo.understood == WINDOW_LINES
    assert (state.status, state.total, state.failed, state.completed) == (ending, 5000, 5000, 0)
    answers, errors = results(tmp_path)
    assert not answers
    assert [each["custom_id"] for each in errors] == [each["custom_id"] for each in lines]
    assert {each["error"]["code"] for each in errors} == {f"batch_{ending}"}


def test_wrong_lines_of_a_job_that_ends_are_told_as_such(tmp_path: Path) -> None:
    folder = new_job(tmp_path, [line("a", "x"), b"nonsense", line("a", "y"), line("b", "")])
    folder.ask_to_cancel()
    asyncio.run(runner(folder, Echo()).run())
    codes = {each["error"]["line"]: each["error"]["code"] for each in results(tmp_path)[1]}
    assert codes == {1: "batch_cancelled", 2: "invalid_json_line", 3: "duplicate_custom_id", 4: "batch_cancelled"}


def test_an_expired_job_stays_so_when_the_clock_is_set_back(tmp_path: Path) -> None:
    lines = [line(f"r{i}", "abc") for i in range(3000)]
    folder = new_job(tmp_path, lines, window=WINDOW)

    async def some_of_it() -> None:
        told = 0

        def tell(_: object) -> None:
            nonlocal told
            told += 1
            if told == 3:
                first.stop()

        first = runner(folder, Echo(), clock=Clock(late=True), tell=tell)
        with pytest.raises(Stopped):
            await first.run()

    asyncio.run(some_of_it())
    assert 0 < folder.state().total < 3000
    echo = Echo()
    assert asyncio.run(runner(folder, echo).run()).status == "expired"
    assert not echo.answered
    assert [each["custom_id"] for each in results(tmp_path)[1]] == [each["custom_id"] for each in lines]


def test_a_job_that_is_not_to_end_is_not_closed(tmp_path: Path) -> None:
    """A timer by another clock may come too early."""
    folder = new_job(tmp_path, [line("a", "abc"), line("b", "")], window=WINDOW)
    with pytest.raises(JobError, match="time is not up"):
        asyncio.run(close_job(folder))
    assert not folder.state().total
    state = asyncio.run(runner(folder, Echo()).run())
    assert (state.status, state.completed, state.failed, state.requests) == ("completed", 1, 1, 1)


def test_a_job_whose_lines_are_all_done_when_its_time_is_up_is_completed(tmp_path: Path) -> None:
    lines = [line(f"r{i}", "abc") for i in range(10)]
    folder = new_job(tmp_path, lines, window=WINDOW)
    command = [sys.executable, echo_endpoint.__file__, str(folder.path), "committed", "2"]
    subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert (folder.state().status, folder.state().completed) == ("in_progress", 10)
    assert asyncio.run(runner(folder, Echo(), clock=Clock(late=True)).run()).status == "completed"
