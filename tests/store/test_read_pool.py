import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.errors import ConfigError
from headrace.store.read_policies import POLICIES, pool_for
from headrace.store.read_pool import ReadPool
from headrace.store.read_unit import Attempt, Outcome, ReadUnit, State, Verdict
from headrace.store.tier_speed import FIRST_PAUSE, TierHealth, TierSpeed

MB = 1 << 20
Pool = ReadPool[str]
Unit = ReadUnit[str]


def unit(holders: int, order: int = 0, owner: int = 1, nbytes: int = MB, what: str = "") -> Unit:
    return ReadUnit(owner, holders, order, nbytes, what)


def taken(pool: Pool, tier: int, now: float = 0.0) -> Attempt[str]:
    attempt = pool.take(tier, now)
    assert attempt is not None
    return attempt


class Machine(RuleBasedStateMachine):
    """Any policy under any order of additions, ends, failures and cancellations."""

    policy = "completion"

    def __init__(self) -> None:
        super().__init__()
        self.depths = (2, 1, 3)
        self.pool: Pool = pool_for(self.policy, self.depths)
        self.now = 0.0
        self.units: list[Unit] = []
        self.flying: list[Attempt[str]] = []
        self.verdicts: dict[Unit, Counter[Verdict]] = {}
        self.cancelled: set[int] = set()
        self.owner = 0

    @rule(
        shape=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3)), min_size=1, max_size=8),
        owners=st.integers(1, 3),
    )
    def add(self, shape: list[tuple[int, int]], owners: int) -> None:
        units = [unit(holders, order, self.owner + 1 + place % owners) for place, (holders, order) in enumerate(shape)]
        self.owner += owners
        self.units += units
        self.verdicts.update({one: Counter() for one in units})
        self.pool.add(units, self.now)
        for lost in self.pool.pop_lost():  # at once: only paused tiers have it
            self.check_lost(lost)

    @rule(tier=st.integers(0, 2))
    def take(self, tier: int) -> None:
        attempt = self.pool.take(tier, self.now)
        if attempt is not None:
            assert attempt.unit.holders >> tier & 1, "only from who has it"
            assert not attempt.unit.failed >> tier & 1, "not again where it failed"
            self.flying.append(attempt)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.OK, Outcome.OK, Outcome.WRONG, Outcome.ERROR]))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        attempt = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        before = attempt.unit.state
        verdict = self.pool.finish(attempt, outcome, self.now)
        self.verdicts[attempt.unit][verdict] += 1
        assert (verdict is Verdict.LATE) == (before is not State.READING)
        if verdict is Verdict.LOST:
            self.check_lost(attempt.unit)
        for lost in self.pool.pop_lost():
            self.check_lost(lost)

    def check_lost(self, lost: Unit) -> None:
        left = [tier for tier in range(3) if lost.holders & ~lost.failed & (1 << tier)]
        assert all(self.pool.health[tier].paused(self.now) for tier in left), "lost, though somebody could read it"

    @rule(seconds=st.floats(0.0, 1.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.owner)
    @rule(data=st.data(), hasten=st.booleans())
    def cancel_or_hasten(self, data: st.DataObject, hasten: bool) -> None:
        owner = data.draw(st.integers(1, self.owner))
        if hasten:
            self.pool.hasten(owner)
        else:
            self.pool.cancel(owner)
            self.cancelled.add(owner)
            assert all(u.state not in (State.PENDING, State.READING) for u in self.units if u.owner == owner)

    @invariant()
    def no_tier_has_more_than_its_depth_or_a_unit_twice(self) -> None:
        for tier, depth in enumerate(self.depths):
            here = [attempt.unit for attempt in self.flying if attempt.tier == tier]
            assert len(here) == self.pool.outstanding(tier) <= depth
            assert len(set(here)) == len(here)

    @invariant()
    def every_unit_is_won_once_at_most(self) -> None:
        for one in self.units:
            assert self.verdicts[one][Verdict.WON] == (one.state is State.WON)
        open_units = sum(one.state in (State.PENDING, State.READING) for one in self.units)
        assert self.pool.unfinished == open_units
        assert self.pool.busy == bool(open_units)

    def teardown(self) -> None:
        """Whatever happened: once attempts succeed, everything ends, and every unit has one fate."""
        self.pool.pop_lost()
        while self.pool.busy or self.flying:
            self.now += 100.0  # past every pause
            for tier in range(3):
                while (attempt := self.pool.take(tier, self.now)) is not None:
                    self.flying.append(attempt)
            assert self.flying, "work is left and nobody has it: a unit was forgotten"
            for attempt in self.flying:
                self.verdicts[attempt.unit][self.pool.finish(attempt, Outcome.OK, self.now)] += 1
            self.flying = []
        for one in self.units:
            won = self.verdicts[one][Verdict.WON]
            assert won == (one.state is State.WON)
            assert one.state is not State.CANCELLED or one.owner in self.cancelled
        assert not self.pool.owned()


class Static(Machine):
    policy = "static"


class Sequential(Machine):
    policy = "sequential"


TestCompletion = Machine.TestCase
TestStatic = Static.TestCase
TestSequential = Sequential.TestCase
for _case in (TestCompletion, TestStatic, TestSequential):
    _case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
del _case


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=30),
    st.lists(st.integers(0, 2), min_size=0, max_size=10),
)
def test_an_idle_tier_with_a_unit_to_take_gets_it(holders: list[int], first: list[int]) -> None:
    pool: Pool = pool_for("completion", (4, 4, 4))
    units = [unit(mask, order) for order, mask in enumerate(holders)]
    pool.add(units, 0.0)
    for tier in first:
        pool.take(tier, 0.0)
    for tier in range(3):
        pending = [u for u in units if u.state is State.PENDING and u.holders >> tier & 1]
        if pending and pool.outstanding(tier) < 4:
            assert pool.take(tier, 0.0) is not None


def test_early_layers_of_all_loads_come_first_and_later_steps_later() -> None:
    pool: Pool = pool_for("completion", (10,))
    pool.add([unit(1, layer, owner, what=f"{owner}.{layer}") for owner in (1, 2) for layer in (0, 1)], 0.0)
    pool.add([unit(1, 0, 3, what="3.0")], 0.0)
    assert [taken(pool, 0).unit.what for _ in range(5)] == ["1.0", "2.0", "1.1", "2.1", "3.0"]


def test_what_a_step_waits_for_comes_first() -> None:
    pool: Pool = pool_for("completion", (10,))
    pool.add([unit(1, 0, 1, what="a0"), unit(1, 1, 1, what="a1")], 0.0)
    pool.add([unit(1, layer, owner, what=f"{owner}.{layer}") for owner in (2, 3) for layer in (0, 1)], 0.0)
    pool.hasten(1)  # is first anyway
    assert taken(pool, 0).unit.what == "a0"
    pool.hasten(3)
    assert [taken(pool, 0).unit.what for _ in range(5)] == ["2.0", "3.0", "2.1", "3.1", "a1"]


def test_what_only_one_tier_has_is_its_first() -> None:
    pool: Pool = pool_for("completion", (10, 10))
    pool.add([unit(3, 0, what="both"), unit(1, 1, what="first"), unit(2, 2, what="second")], 0.0)
    assert [taken(pool, 0).unit.what, taken(pool, 1).unit.what, taken(pool, 1).unit.what] == ["first", "second", "both"]


def warmed(speeds: tuple[float, ...], depths: tuple[int, ...], hedge: bool = True) -> Pool:
    """A pool that has seen each tier read a MiB in so many seconds."""
    pool: Pool = pool_for("completion", depths, hedge=hedge)
    for tier, seconds in enumerate(speeds):
        pool.add([unit(1 << tier, owner=1000 + tier)], 0.0)
        pool.finish(taken(pool, tier, 0.0), Outcome.OK, seconds)
    return pool


def test_a_fast_tier_takes_over_what_a_slow_one_is_at() -> None:
    pool = warmed((0.1, 1.0), (2, 2))
    pool.add([unit(3), unit(3, 1)], 10.0)
    slow = taken(pool, 1, 10.0)
    fast = taken(pool, 0, 10.0)
    assert pool.finish(fast, Outcome.OK, 10.1) is Verdict.WON
    hedge = taken(pool, 0, 10.1)
    assert hedge.hedge
    assert hedge.unit is slow.unit
    assert pool.take(0, 10.1) is None, "nothing is read twice by one tier"
    assert pool.finish(hedge, Outcome.OK, 10.2) is Verdict.WON
    assert not pool.busy
    assert pool.finish(slow, Outcome.OK, 11.0) is Verdict.LATE
    assert pool.hedges == 1


def test_a_slow_tier_does_not_take_over_until_a_fast_one_has_stalled() -> None:
    pool = warmed((0.1, 1.0), (2, 2))
    pool.add([unit(3)], 10.0)
    fast = taken(pool, 0, 10.0)
    assert pool.take(1, 10.0) is None
    when = pool.look_again(1, 10.0)
    assert when == pytest.approx(10.0 + 0.1 + 1.0), "when it is overdue by as long as the slow one takes"
    assert pool.take(1, when - 0.01) is None
    hedge = taken(pool, 1, when + 0.01)
    assert pool.finish(hedge, Outcome.OK, when + 1.0) is Verdict.WON
    assert pool.finish(fast, Outcome.ERROR, when + 2.0) is Verdict.LATE


def test_without_hedges_nothing_is_read_twice() -> None:
    pool = warmed((0.1, 1.0), (2, 2), hedge=False)
    pool.add([unit(3)], 10.0)
    taken(pool, 1, 10.0)
    assert pool.take(0, 10.0) is None
    assert pool.look_again(0, 10.0) is None


def test_a_stalled_read_is_issued_again_before_the_pool_is_dry() -> None:
    pool = warmed((0.1, 0.1), (1, 1))
    pool.add([unit(3, order) for order in range(100)], 10.0)
    stalled = taken(pool, 1, 10.0)
    now = 10.0
    while not (attempt := taken(pool, 0, now)).hedge:
        now += 0.1
        pool.finish(attempt, Outcome.OK, now)
    assert attempt.unit is stalled.unit
    assert now < 10.7
    assert pool.unfinished > 90


def test_an_error_sends_a_unit_to_another_holder_and_the_last_one_loses_it() -> None:
    pool: Pool = pool_for("completion", (1, 1))
    pool.add([unit(3)], 0.0)
    assert pool.finish(taken(pool, 0), Outcome.WRONG, 0.0) is Verdict.RETRY
    assert pool.take(0, 0.0) is None
    assert pool.finish(taken(pool, 1), Outcome.ERROR, 0.0) is Verdict.LOST
    assert not pool.busy


def test_a_failing_tier_is_left_alone_and_tried_again_later_and_later() -> None:
    pool: Pool = pool_for("completion", (4, 4))
    pool.add([unit(1, order, owner=1) for order in range(8)] + [unit(3, order, owner=2) for order in range(8)], 0.0)
    attempts = [taken(pool, 0) for _ in range(4)]
    for attempt in attempts:
        assert pool.finish(attempt, Outcome.ERROR, 0.0) is Verdict.LOST
    assert pool.take(0, 0.0) is None
    assert len(pool.pop_lost()) == 4, "what only it has is a miss"
    assert pool.unfinished == 8, "the rest is the other's"
    later = FIRST_PAUSE + 0.01
    first = taken(pool, 0, later)
    assert pool.take(0, later) is None, "on probation, one at a time"
    pool.finish(first, Outcome.ERROR, later)
    assert pool.take(0, later + FIRST_PAUSE) is None, "the second pause is longer"
    again = taken(pool, 0, later + 2 * FIRST_PAUSE + 0.01)
    pool.finish(again, Outcome.OK, later + 2 * FIRST_PAUSE + 0.02)
    assert [taken(pool, 0, 10.0).tier for _ in range(2)] == [0, 0], "it works again"


def test_wrong_parts_do_not_make_a_tier_fail() -> None:
    pool: Pool = pool_for("completion", (1, 1))
    pool.add([unit(1, order) for order in range(20)], 0.0)
    for _ in range(20):
        assert pool.finish(taken(pool, 0), Outcome.WRONG, 0.0) is Verdict.LOST


def test_static_splits_by_weight_and_sequential_reads_load_by_load() -> None:
    static: Pool = pool_for("static", (40, 40), weights=(3, 1))
    static.add([unit(3, order) for order in range(40)], 0.0)
    counts = [sum(static.take(tier, 0.0) is not None for _ in range(40)) for tier in (0, 1)]
    assert counts == [30, 10]
    sequential: Pool = pool_for("sequential", (10, 10))
    sequential.add([unit(3, layer, owner) for layer in (0, 1) for owner in (1, 2)], 0.0)
    assert sequential.take(1, 0.0) is None, "the first tier has it"
    first = [taken(sequential, 0) for _ in range(2)]
    assert {attempt.unit.owner for attempt in first} == {1}
    assert sequential.take(0, 0.0) is None, "the second load waits for the first"
    for attempt in first:
        sequential.finish(attempt, Outcome.OK, 1.0)
    assert taken(sequential, 0, 1.0).unit.owner == 2


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match=f"'best' is not one of {', '.join(POLICIES)}"):
        pool_for("best", (1,))


def test_speed_follows_a_change_within_some_reads() -> None:
    speed = TierSpeed()
    assert not speed.known
    for _ in range(20):
        speed.observe(MB, 0.01)
    assert speed.known
    assert speed.expected(2 * MB) == pytest.approx(0.02)
    for _ in range(10):
        speed.observe(MB, 0.03)
    assert speed.expected(MB) == pytest.approx(0.03, rel=0.1)


def test_errors_of_reads_begun_before_a_pause_do_not_lengthen_it() -> None:
    health = TierHealth()
    assert [health.failed(0.0) for _ in range(4)] == [False, False, True, False]
    assert health.paused_until == FIRST_PAUSE


def simulate(pool: Pool, rates: tuple[float, ...], n_units: int, nbytes: int = MB) -> float:
    """Seconds to read units that all tiers have, each tier serving one read after the other at its rate."""
    pool.add([unit((1 << len(rates)) - 1, order, nbytes=nbytes) for order in range(n_units)], 0.0)
    now, free, flying = 0.0, [0.0] * len(rates), []
    while True:
        for tier, rate in enumerate(rates):
            while (attempt := pool.take(tier, now)) is not None:
                free[tier] = max(free[tier], now) + nbytes / rate
                flying.append((free[tier], attempt))
        if not pool.busy:
            return now
        flying.sort(key=lambda entry: entry[0])
        now, attempt = flying.pop(0)
        pool.finish(attempt, Outcome.OK, now)


@pytest.mark.parametrize("ratio", [1, 3, 10])
def test_tiers_together_give_nearly_the_sum_of_their_rates(ratio: int) -> None:
    rates = (600e6, 600e6 / ratio)
    pool: Pool = pool_for("completion", (4, 4))
    seconds = simulate(pool, rates, 1000)
    assert 1000 * MB / seconds > 0.97 * sum(rates)
    half = simulate(pool_for("static", (4, 4)), rates, 1000)
    assert half > seconds * 0.99
    assert simulate(pool_for("sequential", (4, 4)), rates, 1000) > 0.97 * seconds * (1 + 1 / ratio)


def test_random_ends_keep_the_order_of_the_heap() -> None:
    """Units of equal rank in everything but their running number are never compared themselves."""
    pool: Pool = pool_for("completion", (8,))
    pool.add([unit(1, 0, owner=n) for n in range(200)], 0.0)
    flying: list[Attempt[str]] = []
    rng = random.Random(0)
    seen = []
    while pool.busy:
        while (attempt := pool.take(0, 0.0)) is not None:
            flying.append(attempt)
            seen.append(attempt.unit.owner)
        pool.finish(flying.pop(rng.randrange(len(flying))), Outcome.OK, 0.0)
    assert seen == list(range(200))
