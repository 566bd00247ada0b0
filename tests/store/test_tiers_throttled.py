import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts_world import PART_BYTES, POOL, content, filled, load, part_id, store

from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.rates import Rate, Sampled, Steps, as_rate, steps
from headrace.store.tiers.throttled import ThrottledTier
from headrace.store.tiers.tier import PartMissing

DROPS = steps((0, 250e6), (2, 80e6), period=3)


class HandClock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.stopped = False

    def now(self) -> float:
        return self.time

    def wait_until(self, due: float) -> None:
        self.time = max(self.time, due)

    def stop(self) -> None:
        self.stopped = True


def test_rates_over_time() -> None:
    assert [DROPS(at) for at in (0, 1.9, 2, 2.9, 3, 5.5)] == [250e6, 250e6, 80e6, 80e6, 250e6, 80e6]
    assert DROPS.bytes_between(0, 3) == pytest.approx(580e6)
    assert DROPS.bytes_between(1, 7) == pytest.approx(2 * 580e6)
    assert DROPS.finish(1.5, 250e6 * 0.5 + 80e6 + 250e6) == pytest.approx(4.0)
    assert DROPS.finish(0, 0) == 0
    assert steps((0, 10), (5, 20)).finish(0, 150) == pytest.approx(10)
    assert steps((0, 10), (1, 0), period=2).finish(0, 20) == pytest.approx(3)
    assert steps((0, 0), (1, 10), period=2).finish(0.25, 10) == pytest.approx(2)
    assert as_rate(7.0).finish(3, 14) == 5


@pytest.mark.parametrize(
    ("changes", "period"),
    [((), 1), (((1, 5),), 3), (((0, 5), (2, 5)), 2), (((0, -1),), 3), (((0, 0),), 3), (((0, 5), (1, 0)), float("inf"))],
)
def test_rates_that_make_no_sense(changes: tuple[tuple[float, float], ...], period: float) -> None:
    with pytest.raises(ValueError, match=r"changes|rates"):
        Steps(changes, period)


@st.composite
def rates(draw: st.DrawFn) -> Rate:
    values = draw(st.lists(st.sampled_from([0.0, 1.0, 3.0, 50.0]), min_size=1, max_size=4))
    values.append(draw(st.sampled_from([1.0, 7.0])))
    times = [float(i) for i in range(len(values))]
    period = draw(st.sampled_from([float("inf"), len(values) + 0.5]))
    return Steps(tuple(zip(times, values, strict=True)), period)


@given(rates(), st.floats(0, 50), st.floats(0.001, 500))
def test_finish_is_the_inverse_of_the_integral(rate: Rate, start: float, nbytes: float) -> None:
    end = rate.finish(start, nbytes)
    assert end >= start
    assert rate.bytes_between(start, end) == pytest.approx(nbytes, rel=1e-6, abs=1e-6)


def test_any_function_of_time_will_do() -> None:
    rate = Sampled(lambda at: 100.0 if at < 1 else 50.0)
    assert rate.bytes_between(0.5, 2) == pytest.approx(100, rel=1e-2)
    assert rate.finish(0.5, 100) == pytest.approx(2, rel=1e-2)
    assert rate(0.5) == 100


def throttled(
    tmp_path: Path, bandwidth: float | Callable[[float], float], **options: float
) -> tuple[ThrottledTier, HandClock]:
    clock = HandClock()
    return ThrottledTier(DirTier(tmp_path, 1 << 30), bandwidth, clock=clock, **options), clock  # type: ignore[arg-type]


def test_reads_and_writes_share_one_device(tmp_path: Path) -> None:
    tier, clock = throttled(tmp_path, PART_BYTES * 10.0)
    store(tier, part_id(1))
    assert clock.time == pytest.approx(1000.1)
    assert load(tier, part_id(1)) == content(part_id(1))
    assert clock.time == pytest.approx(1000.2)
    clock.time += 5  # idle time is lost
    load(tier, part_id(1))
    assert clock.time == pytest.approx(1005.3)
    with pytest.raises(PartMissing):
        load(tier, part_id(2))
    assert clock.time == pytest.approx(1005.3)
    assert [found.part for found in tier.scan()] == [part_id(1)]
    tier.delete(part_id(1))
    assert list(tier.scan()) == []
    tier.close()
    assert clock.stopped
    assert tier.folder == tmp_path / "headrace-kv"


def test_writes_may_have_a_device_of_their_own_and_latency_adds(tmp_path: Path) -> None:
    tier, clock = throttled(tmp_path, PART_BYTES * 10.0, write_bandwidth=PART_BYTES * 2.0, latency=0.25)
    with filled(content(part_id(1))) as data, tier.create(part_id(1), PART_BYTES) as writer:
        writer.put(0, data)
        writer.seal()
    assert clock.time == pytest.approx(1000.75)
    load(tier, part_id(1))
    assert clock.time == pytest.approx(1000.75 + 0.1 + 0.25)
    with filled(content(part_id(2))) as data, tier.create(part_id(2), PART_BYTES) as writer:
        writer.put(0, data)
    with pytest.raises(PartMissing):
        load(tier, part_id(2))


def test_a_varying_bandwidth_is_integrated(tmp_path: Path) -> None:
    tier, clock = throttled(tmp_path, steps((0, PART_BYTES * 1.0), (2, PART_BYTES * 0.5), period=4))
    store(tier, part_id(1))
    ends = []
    for _ in range(5):
        load(tier, part_id(1))
        ends.append(clock.time - 1000)
    assert ends == pytest.approx([2, 4, 5, 6, 8])
    assert tier.capacity_between(1000, 1008) == pytest.approx(6 * PART_BYTES)


def test_requests_in_flight_share_the_bandwidth_in_real_time(tmp_path: Path) -> None:
    # 16 reads by 4 threads at 100 reads a second: 160 ms, whoever does them; at four times that it would be 40 ms.
    tier = ThrottledTier(DirTier(tmp_path, 1 << 30), PART_BYTES * 100.0, write_bandwidth=1e12)
    store(tier, part_id(1))
    begin = time.monotonic()

    def work() -> None:
        for _ in range(4):
            load(tier, part_id(1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - begin
    assert took >= 0.16
    assert took < 30  # something other than the throttle would be wrong
    assert POOL.in_use == 0


def test_closing_frees_those_who_wait(tmp_path: Path) -> None:
    tier = ThrottledTier(DirTier(tmp_path, 1 << 30), 1.0, write_bandwidth=1e12)
    store(tier, part_id(1))
    thread = threading.Thread(target=load, args=(tier, part_id(1)))  # would take ten hours
    thread.start()
    tier.close()
    thread.join(timeout=200)
    assert not thread.is_alive()


def test_depth_is_as_asked_or_enough_to_keep_it_busy(tmp_path: Path) -> None:
    inner = DirTier(tmp_path, 1 << 30, depth=8)
    assert (inner.depth, ThrottledTier(inner, 1.0).depth, ThrottledTier(inner, 1.0, depth=2).depth) == (8, 8, 2)
