"""Whose turn it is among jobs that share an engine."""

import math

from hypothesis import given
from hypothesis import strategies as st

from headrace.offline.jobs.turns import Turn, ends_of, in_turn

NOW = 1000.0
JOBS = st.lists(
    st.builds(
        lambda due, rest: Turn("", NOW + due, rest),
        st.floats(-10, 1000) | st.just(math.inf),
        st.floats(0, 500) | st.none(),
    ),
    min_size=1,
    max_size=8,
).map(lambda jobs: [Turn(str(i), job.due, job.rest) for i, job in enumerate(jobs)])


def ids(jobs: list[Turn]) -> list[str]:
    return [job.id for job in jobs]


def test_the_one_due_first_runs_first() -> None:
    jobs = [Turn("a", 1300, 10), Turn("b", 1100, 10), Turn("c", math.inf, 10)]
    assert ids(in_turn(jobs, None, NOW)) == ["b", "a", "c"]


def test_what_runs_goes_on_while_nobody_is_short_of_time() -> None:
    running, urgent = Turn("long", 5000, 300), Turn("urgent", 1400, 10)
    assert ids(in_turn([urgent, running], running, NOW)) == ["long", "urgent"]
    assert ends_of([running, urgent], NOW) == {"long": 1300, "urgent": 1310}
    urgent.due = 1200
    assert ids(in_turn([urgent, running], running, NOW)) == ["urgent", "long"]


def test_two_that_wait_count_together() -> None:
    running = Turn("long", 5000, 100)
    waiting = [Turn("a", 1300, 100), Turn("b", 1301, 100)]
    assert in_turn([running, waiting[0]], running, NOW)[0] is running
    assert ids(in_turn([running, *waiting], running, NOW)) == ["a", "b", "long"]


def test_what_is_not_known_holds_up_nobody() -> None:
    running, other = Turn("x", 5000, None), Turn("y", 1001, None)
    assert in_turn([running, other], running, NOW)[0] is running
    assert ends_of([running, Turn("z", 2000, 5)], NOW) == {"z": 1005}


@given(JOBS)
def test_jobs_do_not_drive_each_other_out_in_turns(jobs: list[Turn]) -> None:
    running, seen = in_turn(jobs, None, NOW)[-1], set()
    while (first := in_turn(jobs, running, NOW)[0]) is not running:
        assert (first.due, first.id) < (running.due, running.id)
        assert first.id not in seen
        seen.add(first.id)
        running = first


@given(JOBS, st.integers(0, 7))
def test_nobody_is_left_out(jobs: list[Turn], number: int) -> None:
    running = jobs[number % len(jobs)]
    order = in_turn(jobs, running, NOW)
    assert sorted(ids(order)) == sorted(ids(jobs))
    ends = ends_of(order, NOW)
    assert list(ends.values()) == sorted(ends.values())
    assert set(ends) == {job.id for job in jobs if job.rest is not None}
