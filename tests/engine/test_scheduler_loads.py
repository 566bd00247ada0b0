"""The scheduler's part in loads: plain data in, orders out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import PAGE, World, answer

from headrace.engine.outcome import split
from headrace.engine.sequence import Sequence


def world(tokens: int = 12, **options: int) -> World:
    return World(stored=lambda seq: min(tokens, (seq.length - 1) // PAGE * PAGE), **options)


def test_a_stored_prefix_is_ordered_and_nothing_planned_before_it_may_be() -> None:
    here = world()
    request = here.add("a", list(range(15)))
    assert here.schedule(frozenset()) is None  # admitted, with its load
    (order,) = here.scheduler.take_loads()
    assert (order.seq.id, order.start, order.end, order.counts) == ("a", 0, 12, True)
    assert here.scheduler.take_loads() == []
    assert here.schedule(frozenset({"a"})) is None
    here.bring(order, 12, {"disk": 5})
    assert here.scheduler.counters.hits_by_source == {"disk": 12}
    here.drain()
    assert here.outputs["a"] == answer(request)
    assert here.computed == 15 - 12 + 3


def test_it_may_be_planned_while_it_loads() -> None:
    here = world()
    here.add("a", list(range(15)))
    assert here.schedule() is None
    (order,) = here.scheduler.take_loads()
    plan = here.schedule()
    assert plan is not None
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(12, 3)]
    here.scheduler.abandon(plan.id)
    here.bring(order, 8, {"disk": 1})  # it fell short
    again = here.schedule()
    assert again is not None
    assert [(chunk.start, chunk.length) for chunk in again.chunks] == [(8, 7)]
    assert here.scheduler.get("a").cached_tokens == 8


def test_others_wait_for_a_prefix_that_loads() -> None:
    here = world()
    here.add("a", list(range(15)))
    here.add("b", [*range(12), 40, 41])
    here.schedule()
    (order,) = here.scheduler.take_loads()
    assert here.scheduler.waiting == 1
    here.bring(order, 12, {"disk": 1})
    here.drain()
    assert here.scheduler.counters.hits_by_source == {"disk": 12, "pool": 12}


def test_a_full_plan_admits_what_loads_and_nothing_behind_a_cold_one() -> None:
    stored = {"warm": 12, "cold": 0, "late": 12}
    here = World(stored=lambda seq: stored.get(seq.id, 0), budget=4, pages=60)
    here.add("long", [1] * 30)
    here.add("warm", list(range(15)))
    here.add("cold", [2] * 9)
    here.add("late", [*range(20, 35)])
    plan = here.schedule()
    assert plan is not None
    assert [chunk.seq for chunk in plan.chunks] == ["long"]
    assert [order.seq.id for order in here.scheduler.take_loads()] == ["warm"]


def test_what_loads_is_neither_preempted_nor_ended() -> None:
    here = world(pages=12, seqs=3)
    here.add("off", list(range(30, 45)), online=False)
    here.schedule()
    (order,) = here.scheduler.take_loads()
    here.add("on", [7] * 30)  # has no room while the other loads
    assert here.schedule(frozenset({"off"})) is None
    with pytest.raises(AssertionError, match="still writes"):
        here.scheduler.abort("off")
    here.bring(order, 12, {"disk": 1})
    plan = here.schedule()
    assert plan is not None or here.scheduler.take_loads()
    assert here.scheduler.counters.preemptions == 1


@given(
    st.integers(0, 5000), st.dictionaries(st.text("abcd", min_size=1, max_size=3), st.integers(0, 10**12), max_size=5)
)
def test_shares_add_up(total: int, shares: dict[str, int]) -> None:
    parts = split(total, shares)
    assert sum(parts.values()) == (total if sum(shares.values()) else 0)
    assert all(count > 0 for count in parts.values())
    for name, count in parts.items():
        assert abs(count - total * shares[name] / sum(shares.values())) <= 1


@given(st.data())
def test_random_loads_ends_and_aborts_never_read_wrong_kv(data: st.DataObject) -> None:
    """Loads end in any order, whole or short, beside plans; the world checks every KV that is read."""
    salt = data.draw(st.integers(0, 3))

    def stored(seq: Sequence) -> int:
        return min((seq.order * 7 + salt) % 5 * 2 * PAGE, (seq.length - 1) // PAGE * PAGE)

    here = World(stored=stored, pages=30, seqs=5)
    open_orders = []
    for i in range(data.draw(st.integers(1, 8))):
        here.add(f"r{i}", [(i % 3) * 10 + j for j in range(data.draw(st.integers(1, 30)))], 5, online=bool(i % 2))
    for _ in range(400):
        if here.scheduler.idle:
            break
        loading = frozenset(order.seq.id for order in open_orders)
        plan = here.schedule(loading)
        open_orders += here.scheduler.take_loads()
        if plan is not None:
            here.flight.append(plan)
            for chunk in plan.chunks:
                here._compute(here.scheduler.get(chunk.seq), chunk.start, chunk.end)
            here.collect()
        if open_orders and (plan is None or data.draw(st.booleans())):
            order = open_orders.pop(data.draw(st.integers(0, len(open_orders) - 1)))
            pages = data.draw(st.integers(order.start // PAGE, order.end // PAGE))
            here.bring(order, pages * PAGE, {"x": 1, "y": 2})
            if data.draw(st.booleans()):
                here.abort(order.seq.id)
        here.scheduler.check()
    assert here.scheduler.idle
    for name, request in here.requests.items():
        if here.finished[name] != "abort":
            assert here.outputs[name] == answer(request)
    counters = here.scheduler.counters
    assert sum(counters.hits_by_source.values()) == counters.hit_tokens <= counters.prompt_tokens
    assert here.allocator.used == 0
