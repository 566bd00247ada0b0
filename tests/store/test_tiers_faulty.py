import threading
from pathlib import Path

import pytest
from parts_world import PART_BYTES, POOL, content, filled, load, part_id, store

from headrace.store.layout import ALIGNMENT
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.faulty import Fault, FaultPlan, FaultyTier
from headrace.store.tiers.tier import PartMissing, TierError, TierFull

PART = part_id(1)


def faulty(tmp_path: Path, plan: FaultPlan | None = None) -> FaultyTier:
    return FaultyTier(DirTier(tmp_path, 1 << 30), plan)


def nth(**calls: tuple[int, ...]) -> FaultPlan:
    return FaultPlan(calls={Fault[kind]: numbers for kind, numbers in calls.items()})


def test_without_a_plan_it_is_the_inner_tier(tmp_path: Path) -> None:
    tier = faulty(tmp_path)
    store(tier, PART)
    assert load(tier, PART) == content(PART)
    assert [found.part for found in tier.scan()] == [PART]
    tier.delete(PART)
    assert list(tier.scan()) == []
    assert not tier.injected
    assert tier.folder == tmp_path / "headrace-kv"


def test_reads_fail_as_planned(tmp_path: Path) -> None:
    tier = faulty(tmp_path, nth(READ_ERROR=(0,), MISSING=(1,), SHORT_READ=(0,), FLIPPED_BIT=(1,)))
    store(tier, PART)
    with pytest.raises(TierError, match="failed") as caught:
        load(tier, PART)
    assert not isinstance(caught.value, PartMissing)
    with pytest.raises(PartMissing):
        load(tier, PART)
    with POOL.acquire(PART_BYTES) as buffer:
        buffer.view[:] = bytes(PART_BYTES)
        with pytest.raises(TierError, match=f"gave {4 * ALIGNMENT} of {PART_BYTES} bytes"):
            tier.read(PART, 0, buffer.view)
        assert bytes(buffer.view) == content(PART)[: 4 * ALIGNMENT] + bytes(5 * ALIGNMENT)
    assert load(tier, PART) == content(PART)
    wrong = int.from_bytes(load(tier, PART), "little") ^ int.from_bytes(content(PART), "little")
    assert wrong.bit_count() == 1
    assert load(tier, PART) == content(PART)
    assert dict(tier.injected) == dict.fromkeys(
        (Fault.READ_ERROR, Fault.MISSING, Fault.SHORT_READ, Fault.FLIPPED_BIT), 1
    )


def test_writes_fail_as_planned(tmp_path: Path) -> None:
    tier = faulty(tmp_path, nth(FULL=(0,), WRITE_ERROR=(0,), SEAL_ERROR=(0,), DELETE_ERROR=(0,), SCAN_ERROR=(0,)))
    with pytest.raises(TierFull):
        store(tier, PART)
    for _ in range(2):
        with pytest.raises(TierError, match="failed"):
            store(tier, PART)
    with pytest.raises(TierError, match="listing"):
        list(tier.scan())
    assert list(tier.scan()) == []
    store(tier, PART)
    with pytest.raises(TierError, match="deleting"):
        tier.delete(PART)
    assert load(tier, PART) == content(PART)
    with filled(content(PART)) as data, tier.create(part_id(2), PART_BYTES) as writer:
        writer.put(0, data)
    with pytest.raises(PartMissing):
        load(tier, part_id(2))


def test_stalls_last_until_released_or_for_a_while(tmp_path: Path) -> None:
    tier = faulty(tmp_path, nth(READ_STALL=(0,), WRITE_STALL=(2,)))
    store(tier, PART)
    threads = [threading.Thread(target=load, args=(tier, PART)), threading.Thread(target=store, args=(tier, PART))]
    for thread in threads:
        thread.start()
    threads[0].join(0.05)
    threads[1].join(0.05)
    assert all(thread.is_alive() for thread in threads)
    tier.release_stalls()
    for thread in threads:
        thread.join()
    brief = faulty(tmp_path, FaultPlan(calls={Fault.READ_STALL: (0,)}, stall=0.01))
    assert load(brief, PART) == content(PART)
    assert brief.injected == {Fault.READ_STALL: 1}


def test_closing_frees_stalled_calls(tmp_path: Path) -> None:
    tier = faulty(tmp_path, nth(READ_STALL=(0,)))
    store(tier, PART)
    thread = threading.Thread(target=load, args=(tier, PART))
    thread.start()
    tier.close()
    thread.join(timeout=200)
    assert not thread.is_alive()


def test_rates_are_met_and_the_same_in_every_run() -> None:
    plan = FaultPlan(seed=3, rates={Fault.READ_ERROR: 0.1, Fault.FULL: 1.0})
    struck = [call for call in range(5000) if plan.strikes(Fault.READ_ERROR, call)]
    assert 400 < len(struck) < 600
    assert struck == [call for call in range(5000) if FaultPlan(3, plan.rates).strikes(Fault.READ_ERROR, call)]
    assert struck != [call for call in range(5000) if FaultPlan(4, plan.rates).strikes(Fault.READ_ERROR, call)]
    assert all(plan.strikes(Fault.FULL, call) for call in range(100))
    assert not any(plan.strikes(Fault.SHORT_READ, call) for call in range(100))


def test_a_tier_that_is_down_fails_at_everything_and_comes_back(tmp_path: Path) -> None:
    tier = faulty(tmp_path)
    store(tier, PART)
    tier.down = True
    for call in (
        lambda: load(tier, PART),
        lambda: store(tier, PART),
        lambda: tier.delete(PART),
        lambda: list(tier.scan()),
    ):
        with pytest.raises(TierError, match="down"):
            call()
    tier.down = False
    assert load(tier, PART) == content(PART)
