"""What is told of a job's time: its share by the time left, the pace, the optimum, the prediction from a sample."""

import asyncio
from pathlib import Path

import pytest
from echo_endpoint import PROFILE, SHAPE, Echo, line, new_job, runner, write_input
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest
from headrace.core.request import OFFLINE_SHARE
from headrace.offline.jobs.device import JobDevice
from headrace.offline.jobs.endpoint import Answer, Asked
from headrace.offline.jobs.lines import CHAT
from headrace.offline.jobs.optimum import Optimum
from headrace.offline.jobs.predict import EFFICIENCY, USUAL_OUTPUT, sample, seconds_of
from headrace.offline.jobs.progress import Pace, Progress
from headrace.offline.jobs.urgency import MOST_SHARE, share_of
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.target import Target
from headrace.perf.density import CostRates

DEVICE = JobDevice(Target(PROFILE, SHAPE, kv_tokens=8000, max_seqs=16), window=64)


def test_a_job_in_no_hurry_takes_the_usual_share_and_a_late_one_the_most() -> None:
    assert share_of(None, 100.0) == share_of(100.0, None) == share_of(10.0, 100.0) == OFFLINE_SHARE
    assert share_of(100.0, 100.0) == share_of(500.0, 100.0) == share_of(1.0, -1.0) == MOST_SHARE


@given(rest=st.floats(0, 1e6), more=st.floats(0, 1e6), left=st.floats(1e-3, 1e6))
def test_the_share_only_grows_with_what_is_left_to_do(rest: float, more: float, left: float) -> None:
    assert OFFLINE_SHARE <= share_of(rest, left) <= share_of(rest + more, left) <= MOST_SHARE


def test_the_pace_foresees_the_end_of_equal_requests() -> None:
    pace = Pace(100 * 50, 100 * 20)
    assert pace.rest(1.0) is None
    for _ in range(25):
        pace.finish(50, 20, 10)
    assert pace.tokens == 25 * 60
    assert pace.rest(5.0) == pytest.approx(15.0)
    for _ in range(75):
        pace.finish(50, 20, 10)
    assert pace.rest(20.0) == pytest.approx(0.0)


def test_refused_requests_are_done_but_say_nothing_of_the_others() -> None:
    pace = Pace(100 * 50, 100 * 20)
    for _ in range(50):
        pace.finish(50, 20, 0)
    assert pace.rest(1.0) is None
    for _ in range(25):
        pace.finish(50, 20, 10)
    assert pace.tokens == 25 * 60
    assert pace.rest(5.0) == pytest.approx(5.0)


class Refusing(Echo):
    """Answers short texts only."""

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        if len(asked.handle) > 10:
            raise InvalidRequest("too long", "text")
        return await super().run(asked, share, worker)


def test_a_job_with_refused_lines_has_nothing_left_at_its_end(tmp_path: Path) -> None:
    folder = new_job(tmp_path, [line(f"r{i}", "abc" * (1 if i % 2 else 500)) for i in range(100)])
    seen: list[Progress] = []
    state = asyncio.run(runner(folder, Refusing(), tell=seen.append).run())
    assert (state.completed, state.failed, seen[-1].eta_s) == (50, 50, 0.0)


@pytest.mark.parametrize(("left", "share"), [(86400.0, OFFLINE_SHARE), (0.01, MOST_SHARE)])
def test_a_late_job_asks_for_more_of_the_steps_than_one_with_time(tmp_path: Path, left: float, share: float) -> None:
    folder = new_job(tmp_path, [line(f"r{i}", "abc" * 10) for i in range(2000)], window=86400.0)
    closes = folder.spec().expires_at or 0.0
    echo = Echo()

    async def run() -> None:
        running = runner(folder, echo, 16, clock=lambda: closes - left)
        task = asyncio.create_task(running.run())
        await echo.after(100)
        running.look()
        assert (await task).completed == 2000

    asyncio.run(run())
    assert echo.shares[0] == OFFLINE_SHARE  # nothing is known yet
    assert echo.shares[-1] == max(echo.shares) == share


def test_the_optimum_counts_shared_prefixes_once() -> None:
    shared = list(range(40))
    requests = JobRequests.of([[*shared, 100], [*shared, 101], [7, 8, 9]], [5, 5, 5])
    optimum = Optimum(requests, PROFILE, SHAPE, 512)
    for index in range(3):
        optimum.finish(index, 5)
    rates = CostRates.of(PROFILE, SHAPE, 512)
    compute = rates.compute([41, 41, 3], [5, 5, 5], [0, 40, 0]).sum() + rates.memory([41, 41, 3], [5, 5, 5]).sum()
    assert optimum.seconds == pytest.approx(float(compute))


def test_an_estimated_device_has_no_optimum_to_compare_with() -> None:
    assert DEVICE.optimum(JobRequests.of([[1]], [1])) is None


def test_a_prediction_needs_some_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    write_input(path, [line(f"r{i:05}", "x" * 40) for i in range(3000)])
    looked = asyncio.run(sample(path, CHAT, Echo()))
    assert looked.lines == pytest.approx(3000, rel=0.01)
    assert looked.requests == 1.0
    assert set(looked.prompts) == {40}
    assert set(looked.outputs) == {20.0}
    rates = CostRates.of(PROFILE, SHAPE, 512)
    each = float(rates.compute(40, 20.0) + rates.memory(40, 20.0))
    assert seconds_of(looked, DEVICE) == pytest.approx(3000 * each / EFFICIENCY, rel=0.01)


def test_a_prediction_passes_over_wrong_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    write_input(path, [b"nonsense" * 10 if i % 2 else line(f"r{i}", "x" * 2000) for i in range(40)])
    looked = asyncio.run(sample(path, CHAT, Echo()))
    assert 0 < looked.requests < 1
    assert set(looked.outputs) == {USUAL_OUTPUT}
    write_input(path, [b"nonsense"])
    assert seconds_of(asyncio.run(sample(path, CHAT, Echo())), DEVICE) == 0.0
