"""What goes wrong in one line, or on one worker, stays there."""

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path

import pytest
from echo_endpoint import Echo, line, new_job, results, runner

from headrace.core.errors import EngineDead, QueueFull
from headrace.offline.jobs.backoff import RETRY_SECONDS, Backoff
from headrace.offline.jobs.endpoint import Answer, Asked
from headrace.offline.jobs.errors import JobError


class Faulty(Echo):
    """Has an error of its own: it raises `error` for the text `bad`, in `place`."""

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__()
        self._place, self._error = place, error

    async def prepare(self, url: str, body: bytes) -> Asked:
        asked = await super().prepare(url, body)
        if asked.handle == "bad" and self._place == "prepare":
            raise self._error
        return asked

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        if asked.handle == "bad" and self._place == "run":
            raise self._error
        return await super().run(asked, share, worker)

    def refusal(self, error: BaseException) -> Answer:
        return Answer(500, "r", b'{"error":{"message":"see the log"}}')


@pytest.mark.parametrize("place", ["prepare", "run"])
def test_an_error_that_nobody_foresaw_is_the_lines_and_the_log_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    lines = [line(f"r{i}", "bad" if i == 3 else "abc") for i in range(20)]
    folder = new_job(tmp_path, lines)
    with caplog.at_level(logging.ERROR):
        state = asyncio.run(runner(folder, Faulty(place, KeyError("a field of our own"))).run())
    assert (state.status, state.completed, state.failed) == ("completed", 19, 1)
    ((bad,), answers) = results(tmp_path)[1], results(tmp_path)[0]
    assert (bad["custom_id"], bad["line"], bad["response"]["status_code"]) == ("r3", 4, 500)
    assert len(answers) == 19
    assert "a field of our own" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("place", ["prepare", "run"])
def test_a_disk_that_fails_ends_the_attempt_and_no_line(tmp_path: Path, place: str) -> None:
    folder = new_job(tmp_path, [line("a", "abc"), line("b", "bad")])
    with pytest.raises(JobError, match="resume"):
        asyncio.run(runner(folder, Faulty(place, OSError(5, "Input/output error"))).run())
    state = asyncio.run(runner(folder, Echo()).run())
    assert (state.completed, state.failed) == (2, 0)


class Busy(Echo):
    """Has no room for some time from the first request on."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._until: float | None = None
        self.refused = 0
        self.understood: Counter[bytes] = Counter()

    async def prepare(self, url: str, body: bytes) -> Asked:
        self.understood[body] += 1
        return await super().prepare(url, body)

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        self._until = self._until or time.monotonic() + self._seconds
        if time.monotonic() < self._until:
            self.refused += 1
            raise QueueFull("no room")
        return await super().run(asked, share, worker)


def test_one_line_at_a_time_asks_an_engine_that_has_no_room(tmp_path: Path) -> None:
    folder = new_job(tmp_path, [line(f"r{i}", f"abc{i}") for i in range(50)])
    echo = Busy(4 * RETRY_SECONDS)
    state = asyncio.run(runner(folder, echo).run())
    assert state.completed == 50
    assert 1 <= echo.refused <= 5
    assert set(echo.understood.values()) == {2}  # when it was validated, and when it was run


def test_who_waits_for_room_goes_in_order() -> None:
    async def run() -> list[int]:
        backoff, went = Backoff(0.02), list[int]()

        async def go(number: int) -> None:
            await backoff.wait()
            went.append(number)

        backoff.refused()
        await asyncio.gather(*map(go, range(10)))
        return went

    assert asyncio.run(run()) == list(range(10))


class Hanging(Echo):
    """Its second worker answers no line, and ends at the fifth."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = 0
        self.given_up = 0

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        if worker == 0:
            return await super().run(asked, share, worker)
        self._asked += 1
        if self._asked == 5:
            raise EngineDead("it fell silent")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # it takes a moment to tell the engine
            self.given_up += 1
        raise AssertionError


def test_what_a_lost_worker_was_asked_for_is_aborted(tmp_path: Path) -> None:
    lines = [line(f"r{i}", "abc") for i in range(200)]
    folder, echo = new_job(tmp_path, lines), Hanging()

    async def run() -> None:
        await runner(folder, echo, 16, workers=2).run()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert echo.given_up >= 4
    assert sorted(each["custom_id"] for each in results(tmp_path)[0]) == sorted(each["custom_id"] for each in lines)


def test_a_line_that_the_journal_lacks_is_told(tmp_path: Path) -> None:
    journal = new_job(tmp_path, [line("a", "abc")]).journal()
    try:
        with pytest.raises(JobError, match="no line 7"):
            journal.line(7)
    finally:
        journal.close()
