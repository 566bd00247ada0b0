"""A job: every line gets exactly one result, whatever happens to the process that runs it."""

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import echo_endpoint
import pytest
from echo_endpoint import Echo, line, new_job, results, runner

from headrace.core.errors import EngineDead
from headrace.offline.jobs import runner as runner_module
from headrace.offline.jobs import validate
from headrace.offline.jobs.cancel import cancel_job
from headrace.offline.jobs.endpoint import Answer, Asked
from headrace.offline.jobs.errors import JobBusy, JobError
from headrace.offline.jobs.folder import JOURNAL, JobFolder, list_jobs, open_job
from headrace.offline.jobs.generation import MAX_ATTEMPTS
from headrace.offline.jobs.journal import Journal
from headrace.offline.jobs.lines import RawLine, check_file, read_lines
from headrace.offline.jobs.results import ResultFiles
from headrace.offline.jobs.runner import Stopped
from headrace.offline.jobs.spool import job_requests


def some_lines(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Lines of 1 to 60 letters."""
    dice = random.Random(seed)
    return [line(f"r{i}", "".join(dice.choices("abc", k=dice.randint(1, 60)))) for i in range(count)]


def check(home: Path, lines: list[Any]) -> None:
    """Each line has one result, and the right one."""
    answers, errors = results(home)
    assert not errors
    assert sorted(each["custom_id"] for each in answers) == sorted(each["custom_id"] for each in lines)
    texts = {each["custom_id"]: each["body"]["text"] for each in lines}
    assert all(each["response"]["body"] == {"echo": texts[each["custom_id"]]} for each in answers)
    assert len({each["id"] for each in answers}) == len(answers)


class Together(Echo):
    """Answers nobody before so many wait."""

    def __init__(self, many: int) -> None:
        super().__init__()
        self._here = asyncio.Barrier(many)
        self._met = False

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        if not self._met:
            await self._here.wait()
            self._met = True
        return await super().run(asked, share, worker)


def test_every_line_is_answered_once(tmp_path: Path) -> None:
    lines = some_lines(1000)
    folder = new_job(tmp_path, lines)
    echo = Together(32)
    seen: list[Any] = []
    state = asyncio.run(runner(folder, echo, 32, tell=seen.append).run())
    check(tmp_path, lines)
    assert (state.status, state.total, state.completed, state.failed) == ("completed", 1000, 1000, 0)
    assert state.prompt_tokens == state.output_tokens == sum(len(each["body"]["text"]) for each in lines)
    assert echo.most == 32
    assert not folder.spool.exists()
    assert not (tmp_path / "errors.jsonl").exists()
    assert [each.status for each in seen][-1] == "completed"
    assert [each.id for each in list_jobs(tmp_path / "jobs")] == [folder.id]


@pytest.mark.parametrize("order", ["fcfs", "dfs", "blend"])
def test_several_workers_share_a_job(tmp_path: Path, order: str) -> None:
    lines = some_lines(600)
    echo = Echo()
    state = asyncio.run(runner(new_job(tmp_path, lines), echo, 16, workers=3, order=order).run())
    check(tmp_path, lines)
    assert state.completed == 600
    assert set(echo.by_worker) == {0, 1, 2}


@pytest.mark.parametrize("order", ["fcfs", "blend"])
@pytest.mark.parametrize("dies_after", [0, 40])
def test_what_a_lost_worker_had_is_done_by_the_others(tmp_path: Path, order: str, dies_after: int) -> None:
    lines = some_lines(400)
    echo = Echo(dies_after=dies_after, mortal=1)
    state = asyncio.run(runner(new_job(tmp_path, lines), echo, 16, workers=3, order=order).run())
    check(tmp_path, lines)
    assert state.completed == 400
    assert echo.by_worker[1] == dies_after


def test_without_any_worker_left_the_job_waits_for_another_attempt(tmp_path: Path) -> None:
    lines = some_lines(100)
    folder = new_job(tmp_path, lines)
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=30), 16, workers=2).run())
    asyncio.run(runner(folder, Echo(), 16, workers=2).run())
    check(tmp_path, lines)


def test_a_final_job_is_not_run_again(tmp_path: Path) -> None:
    lines = some_lines(10)
    folder = new_job(tmp_path, lines)
    asyncio.run(runner(folder, Echo()).run())
    again = Echo()
    assert asyncio.run(runner(folder, again).run()).status == "completed"
    assert not again.answered
    check(tmp_path, lines)


def test_a_job_that_is_let_go_goes_on_where_it_was(tmp_path: Path) -> None:
    lines = some_lines(500)
    folder = new_job(tmp_path, lines)
    first, second = Echo(), Echo()

    async def some_of_it() -> None:
        running = runner(folder, first, 4)
        task = asyncio.create_task(running.run())
        await first.after(50)
        running.stop()
        with pytest.raises(Stopped):
            await task

    asyncio.run(some_of_it())
    kept = len(results(tmp_path)[0])
    assert 46 <= kept < 500  # the four under way may have been answered without being taken
    assert folder.state().status == "in_progress"
    asyncio.run(runner(folder, second).run())
    check(tmp_path, lines)
    assert len(second.answered) == 500 - kept


def test_a_dead_engine_leaves_what_is_done(tmp_path: Path) -> None:
    lines = some_lines(300)
    folder = new_job(tmp_path, lines)
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=100), 8).run())
    assert 90 <= len(results(tmp_path)[0]) <= 100
    asyncio.run(runner(folder, Echo()).run())
    check(tmp_path, lines)


def test_a_full_queue_and_passing_faults_are_tried_again(tmp_path: Path) -> None:
    lines = some_lines(20)
    folder = new_job(tmp_path, lines)
    asyncio.run(runner(folder, Echo(full=3, faults=MAX_ATTEMPTS - 1), 1).run())
    check(tmp_path, lines)


def test_a_fault_that_stays_becomes_the_lines_error(tmp_path: Path) -> None:
    lines = some_lines(3)
    folder = new_job(tmp_path, lines)
    state = asyncio.run(runner(folder, Echo(faults=MAX_ATTEMPTS), 1).run())
    answers, errors = results(tmp_path)
    assert (state.completed, state.failed) == (len(answers), len(errors)) == (2, 1)
    assert errors[0]["response"]["status_code"] == 500


def test_wrong_lines_are_told_and_the_rest_runs(tmp_path: Path) -> None:
    lines = [line("a", "x"), b"nonsense", line("a", "twice"), line("b", ""), line("c", "y")]
    folder = new_job(tmp_path, lines)
    state = asyncio.run(runner(folder, Echo()).run())
    answers, errors = results(tmp_path)
    assert (state.total, state.completed, state.failed, state.requests) == (5, 2, 3, 2)
    assert [each["custom_id"] for each in answers] == ["a", "c"]
    assert [each.get("line") or each["error"]["line"] for each in errors] == [2, 3, 4]


def test_only_one_process_runs_a_job(tmp_path: Path) -> None:
    folder = new_job(tmp_path, some_lines(5))
    with folder.lock():
        assert folder.running
        with pytest.raises(JobBusy):
            asyncio.run(runner(folder, Echo()).run())
    assert not folder.running


def test_a_changed_input_is_noticed(tmp_path: Path) -> None:
    lines = some_lines(50)
    folder = new_job(tmp_path, lines)
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=10), 2).run())
    content = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "in.jsonl").write_bytes(content.replace(b"r49", b"r4X"))
    with pytest.raises(JobError, match="line 50"):
        asyncio.run(runner(folder, Echo()).run())


def test_the_loop_is_left_to_others_while_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = some_lines(1000)
    folder = new_job(tmp_path, lines)
    threads: set[str] = set()
    journal = {"line", "columns", "pending", "commit", "commit_lines"}

    def noted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            threads.add(function.__name__)
            assert threading.current_thread() is not threading.main_thread()
            return function(*arguments)

        return call

    def read(*arguments: Any) -> Iterator[RawLine]:
        found = read_lines(*arguments)
        while (each := noted(next)(found, None)) is not None:
            yield each

    monkeypatch.setattr(validate, "read_lines", read)
    monkeypatch.setattr(runner_module, "check_file", noted(check_file))
    monkeypatch.setattr(runner_module, "job_requests", noted(job_requests))
    monkeypatch.setattr(ResultFiles, "close", noted(ResultFiles.close))
    for name in journal:
        monkeypatch.setattr(Journal, name, noted(getattr(Journal, name)))
    asyncio.run(runner(folder, Echo()).run())
    check(tmp_path, lines)
    assert threads == {"next", "check_file", "job_requests", "close", *journal}


@pytest.mark.parametrize("validated", [False, True])
def test_another_model_does_not_go_on_with_a_job(tmp_path: Path, validated: bool) -> None:
    lines = some_lines(3000)
    folder = new_job(tmp_path, lines)
    if validated:
        with pytest.raises(EngineDead):
            asyncio.run(runner(folder, Echo(dies_after=10), 2).run())
    else:
        command = [sys.executable, echo_endpoint.__file__, str(folder.path), "spooled", "4"]
        subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert folder.state().validated == validated
    other = Echo()
    other.fingerprint = "0" * 64
    with pytest.raises(JobError, match=r"eeeeeeeeeeee.*000000000000.*new job"):
        asyncio.run(runner(folder, other).run())
    assert not other.answered
    asyncio.run(runner(folder, Echo()).run())
    check(tmp_path, lines)


def test_a_job_can_be_ended_whatever_model_is_there(tmp_path: Path) -> None:
    folder = new_job(tmp_path, some_lines(100), window=3600.0)
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=10), 2).run())
    other = Echo()
    other.fingerprint = "0" * 64
    state = asyncio.run(runner(folder, other, clock=lambda: time.time() + 3601).run())
    assert (state.status, state.total) == ("expired", 100)


def test_a_shortened_output_is_noticed_and_a_lengthened_one_cut(tmp_path: Path) -> None:
    lines = some_lines(50)
    folder = new_job(tmp_path, lines)
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=20), 2).run())
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    output.write_bytes(whole[:-5])
    with pytest.raises(JobError, match="was changed"):
        asyncio.run(runner(folder, Echo()).run())
    output.write_bytes(whole + b'{"half a line')
    asyncio.run(runner(folder, Echo()).run())
    check(tmp_path, lines)


def test_cancelled_by_another_process_while_it_runs(tmp_path: Path) -> None:
    lines = some_lines(2000)
    folder = new_job(tmp_path, lines)
    echo = Echo()

    async def run() -> None:
        running = runner(folder, echo, 4)
        task = asyncio.create_task(running.run())
        await echo.after(20)
        assert (await cancel_job(open_job(folder.id, tmp_path / "jobs"))).status == "cancelling"
        running.look()
        assert (await task).status == "cancelled"

    asyncio.run(run())
    answers, errors = results(tmp_path)
    assert len(answers) >= 20
    assert sorted(each["custom_id"] for each in answers + errors) == sorted(each["custom_id"] for each in lines)
    assert all(each["error"]["code"] == "batch_cancelled" for each in errors)


def test_cancelled_before_it_ever_ran(tmp_path: Path) -> None:
    lines = some_lines(2000)
    folder = new_job(tmp_path, lines)
    assert asyncio.run(cancel_job(folder)).status == "cancelled"
    answers, errors = results(tmp_path)
    assert not answers
    assert [each["custom_id"] for each in errors] == [each["custom_id"] for each in lines]


def test_cancelled_and_killed_while_validating(tmp_path: Path) -> None:
    lines = some_lines(3000)
    folder = new_job(tmp_path, lines)
    folder.ask_to_cancel()
    command = [sys.executable, echo_endpoint.__file__, str(folder.path), "spooled", "4"]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    state = folder.state()
    assert state.status == "cancelling"
    assert 0 < state.total < 3000
    state = asyncio.run(cancel_job(folder))
    assert (state.status, state.total, state.failed) == ("cancelled", 3000, 3000)
    assert [each["custom_id"] for each in results(tmp_path)[1]] == [each["custom_id"] for each in lines]


def test_cancelled_without_the_input(tmp_path: Path) -> None:
    folder = new_job(tmp_path, some_lines(100))
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=10), 1).run())
    (tmp_path / "in.jsonl").unlink()
    with pytest.raises(JobError, match=r"in\.jsonl.*resume"):
        asyncio.run(runner(folder, Echo()).run())
    assert asyncio.run(cancel_job(folder)).status == "cancelled"
    answers, errors = results(tmp_path)
    assert len(answers) == 10
    assert [each["error"]["line"] for each in errors] == list(range(11, 101))
    assert all(each["custom_id"] is None for each in errors)


def test_an_input_that_is_gone_before_it_was_read_may_come_back(tmp_path: Path) -> None:
    lines = some_lines(10)
    folder = new_job(tmp_path, lines)
    (tmp_path / "in.jsonl").rename(tmp_path / "away")
    with pytest.raises(JobError, match="put it back"):
        asyncio.run(runner(folder, Echo()).run())
    assert folder.state().status == "validating"
    (tmp_path / "away").rename(tmp_path / "in.jsonl")
    asyncio.run(runner(folder, Echo()).run())
    check(tmp_path, lines)


def test_a_job_whose_input_was_never_read_can_be_cancelled(tmp_path: Path) -> None:
    folder = new_job(tmp_path, some_lines(10))
    (tmp_path / "in.jsonl").unlink()
    state = asyncio.run(cancel_job(folder))
    assert (state.status, state.total) == ("cancelled", 0)
    assert "in.jsonl" in state.reason


def test_a_full_disk_under_the_journal_stops_the_job_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = some_lines(1000)
    folder = new_job(tmp_path, lines)

    def bounded(self: JobFolder) -> Journal:
        journal = Journal(self.path / JOURNAL)
        journal._db.execute("PRAGMA max_page_count = 20")  # SQLite's own way to have no more room
        return journal

    with monkeypatch.context() as patch:
        patch.setattr(JobFolder, "journal", bounded)
        with pytest.raises(JobError, match=f"full; `headrace batch resume {folder.id}` goes on"):
            asyncio.run(runner(folder, Echo()).run())
    asyncio.run(runner(folder, Echo()).run())
    check(tmp_path, lines)


def test_expired_between_two_attempts(tmp_path: Path) -> None:
    lines = some_lines(300)
    folder = new_job(tmp_path, lines, window=3600.0)
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=100), 8).run())
    kept = len(results(tmp_path)[0])
    state = asyncio.run(runner(folder, Echo(), clock=lambda: time.time() + 3601).run())
    answers, errors = results(tmp_path)
    assert state.status == "expired"
    assert len(answers) == kept == state.completed
    assert len(errors) == 300 - kept == state.failed
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}


# While lines are validated (47 windows, of which three have an error to write), then while results come.
DEATHS = [
    ("spooled", 1), ("half", 1), ("spooled", 4), ("journal", 3), ("written", 1), ("spooled", 9), ("synced", 1),
    ("committed", 1), ("half", 1), ("journal", 1), ("written", 2), ("half", 3), ("synced", 2), ("journal", 2),
    ("committed", 2), ("synced", 1), ("half", 2),
]  # fmt: skip


def test_killed_at_every_kind_of_moment(tmp_path: Path) -> None:
    lines: list[Any] = some_lines(3000)
    lines[700] = lines[1000] = lines[2900] = b"not a request"
    folder = new_job(tmp_path, lines)
    for point, count in DEATHS:
        command = [sys.executable, echo_endpoint.__file__, str(folder.path), point, str(count)]
        ended = subprocess.run(command, capture_output=True, check=False, timeout=120)
        assert ended.returncode == -signal.SIGKILL, (point, count, ended.stderr.decode())
        assert not folder.running
    state = asyncio.run(runner(folder, Echo()).run())
    answers, errors = results(tmp_path)
    expected = sorted(each["custom_id"] for each in lines if isinstance(each, dict))
    assert sorted(each["custom_id"] for each in answers) == expected
    assert [each["error"]["line"] for each in errors] == [701, 1001, 2901]
    assert (state.total, state.completed, state.failed) == (3000, 2997, 3)
