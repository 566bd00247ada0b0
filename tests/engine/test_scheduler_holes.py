"""A prefix whose front is computed while its rest is loaded: whoever comes first, nothing is read that is not there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import PAGE, World, answer

from headrace.engine.outcome import LoadOrder

STORED = 40


def split_world(start: int, **options: int) -> tuple[World, LoadOrder]:
    """One request of 43 tokens, of which 40 are stored and those from `start` on are loaded."""
    here = World(stored=lambda seq: STORED, meet=lambda seq, held, stored: max(start, held), **options)
    here.add("a", list(range(STORED + 3)))
    assert here.schedule() is None
    (order,) = here.scheduler.take_loads()
    assert (order.start, order.end) == (start, STORED)
    return here, order


def test_plans_cover_the_front_and_stop_before_the_hole() -> None:
    here, order = split_world(16, budget=12)
    plans = [here.step(), here.step(), here.step()]
    assert [[(chunk.start, chunk.end) for chunk in plan.chunks] for plan in plans if plan] == [[(0, 12)], [(12, 16)]]
    here.bring(order, STORED, {"disk": 1})
    here.drain()
    assert here.computed == 16 + 3 + 3  # the front, the rest of the prompt, three of four outputs
    assert here.scheduler.counters.hits_by_source == {"disk": STORED - 16}


def test_a_load_that_ends_first_waits_for_the_model() -> None:
    here, order = split_world(16, budget=12)
    here.step()
    here.bring(order, STORED, {"disk": 1})
    seq = here.scheduler.get("a")
    assert (seq.computed, seq.scheduled, seq.hole) == (12, 12, (16, STORED))
    here.step()
    assert (seq.computed, seq.scheduled, seq.hole) == (STORED, STORED, None)
    here.drain()
    assert here.outputs["a"] == answer(here.requests["a"])


@pytest.mark.parametrize("tokens", [16, 24, STORED])
def test_the_model_may_take_more_before_the_load_ends(tokens: int) -> None:
    here, order = split_world(8, budget=12)
    seq = here.scheduler.get("a")
    while here.step() is not None:
        pass
    seq.hole = (tokens, STORED)  # the flow has taken chunks back
    while here.step() is not None:
        pass
    assert seq.computed == tokens
    here.bring(LoadOrder(seq, tokens, STORED, order.counts), STORED, {"disk": 1})
    here.drain()
    assert here.outputs["a"] == answer(here.requests["a"])
    assert here.computed == tokens + 3 + 3


@given(
    start=st.integers(0, STORED // PAGE).map(lambda pages: pages * PAGE),
    brought=st.integers(0, STORED // PAGE).map(lambda pages: pages * PAGE),
    steps=st.integers(0, 6),
    budget=st.integers(1, 20),
    depth=st.integers(1, 2),
    abandon=st.booleans(),
    preempt=st.booleans(),
)
def test_whenever_it_ends_and_whatever_came_the_answer_is_right(
    start: int, brought: int, steps: int, budget: int, depth: int, abandon: bool, preempt: bool
) -> None:
    here, order = split_world(start, budget=budget, depth=depth)
    for _ in range(steps):
        here.step()
    if abandon:
        here.submit()
    while abandon and here.flight:
        here.abandon()
    here.bring(order, max(start, brought), {"disk": 1})
    while here.flight:
        here.collect()
    if preempt and here.scheduler.running:
        here.scheduler.preempt_last()
        here.submit()
        for again in here.scheduler.take_loads():
            here.bring(again, STORED, {"disk": 1})
    here.drain()
    assert here.outputs["a"] == answer(here.requests["a"])
    assert here.allocator.used == 0
