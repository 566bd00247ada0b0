"""The owner's catalog: never above capacity, every byte accounted for, whatever happens in whatever order."""

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from parts_world import part_id, store

from headrace.store.catalog.local import RETRY_SECONDS, LocalCatalog
from headrace.store.layout import ALIGNMENT
from headrace.store.part import PartId, PartRange
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.faulty import Fault, FaultPlan, FaultyTier
from headrace.store.tiers.tier import Scanned

CAPACITY = 10 * ALIGNMENT
SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def save(catalog: LocalCatalog, part: PartId, pages: int = 1, weight: float = 1.0) -> bool:
    if not catalog.reserve(part, pages * ALIGNMENT, weight):
        return False
    store(catalog.tier, part, pages * ALIGNMENT)
    catalog.publish(part)
    return True


def holds(catalog: LocalCatalog, part: PartId) -> bool:
    return any(part.range in ranges for ranges in catalog.find([part.key]))


def on_disk(tier: DirTier) -> dict[PartId, int]:
    return {scanned.part: scanned.nbytes for scanned in tier.scan()}


class CatalogMachine(RuleBasedStateMachine):
    """Random calls; the model knows what was published and what was dropped, and the disk knows the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=SHM))
        self.disk = DirTier(self.folder, CAPACITY)
        self.tier = FaultyTier(self.disk, FaultPlan())
        self.time = Time()
        self.wall = Time()
        self.catalog = self.open()
        self.writing: dict[PartId, tuple[int, str]] = {}
        self.published: dict[PartId, int] = {}

    def open(self) -> LocalCatalog:
        return LocalCatalog(self.tier, time_to_live=50.0, clock=self.time, wall=self.wall)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    parts = st.builds(
        lambda number, first: PartId(part_id(number).key, PartRange(first, first + 1, 0, 1)),
        st.integers(0, 9),
        st.integers(0, 1),
    )

    @rule(part=parts, pages=st.integers(1, 11), weight=st.floats(0, 10), holder=st.sampled_from(["", "x", "y"]))
    def reserve(self, part: PartId, pages: int, weight: float, holder: str) -> None:
        had = holds(self.catalog, part)
        others = sum(nbytes for nbytes, _ in self.writing.values())
        granted = self.catalog.reserve(part, pages * ALIGNMENT, weight, holder)
        if had or part in self.writing or pages * ALIGNMENT + others > CAPACITY:
            assert not granted
        elif not self.tier.plan.rates:
            assert granted or self.time.now < self.retry_at
        if granted:
            self.writing[part] = (pages * ALIGNMENT, holder)

    retry_at = 0.0

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(sorted(self.writing)))
        nbytes, holder = self.writing.pop(part)
        store(self.disk, part, nbytes)
        self.catalog.publish(part, "nobody")
        assert not holds(self.catalog, part), "only the writer publishes"
        self.catalog.publish(part, holder)
        assert holds(self.catalog, part)
        self.published[part] = nbytes

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(sorted(self.writing)))
        self.catalog.withdraw(part, self.writing.pop(part)[1])

    @rule(part=parts)
    def drop(self, part: PartId) -> None:
        self.catalog.drop(part)
        assert not holds(self.catalog, part)

    @rule(holder=st.sampled_from(["x", "y"]))
    def abandon(self, holder: str) -> None:
        self.catalog.abandon(holder)
        self.writing = {part: (nbytes, who) for part, (nbytes, who) in self.writing.items() if who != holder}
        self.catalog.sweep()

    @rule(broken=st.booleans())
    def deletes_fail(self, broken: bool) -> None:
        self.tier.plan = FaultPlan(rates={Fault.DELETE_ERROR: 1.0} if broken else {})
        self.retry_at = self.time.now + RETRY_SECONDS

    @rule(seconds=st.sampled_from([0.1, 5.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.time.now += seconds
        self.wall.now += seconds
        self.catalog.sweep()

    @rule()
    def restart(self) -> None:
        self.wall.now = 1e12 if self.time.now > 1200 else 0.0  # all expired, or all of now
        self.catalog = self.open()
        self.writing.clear()

    @invariant()
    def books_are_right(self) -> None:
        self.catalog.check()
        usage = self.catalog.usage()
        disk = on_disk(self.disk)
        assert sum(disk.values()) + sum(nbytes for nbytes, _ in self.writing.values()) <= usage.used
        if not self.tier.plan.rates and self.time.now >= self.retry_at:
            assert usage.used <= CAPACITY

    @invariant()
    def what_is_found_is_there(self) -> None:
        disk = on_disk(self.disk)
        found = {
            PartId(key, range_)
            for key in {part.key for part in self.published}
            for ranges in self.catalog.find([key])
            for range_ in ranges
        }
        assert found <= disk.keys()
        assert found <= self.published.keys()
        assert len(found) == self.catalog.usage().parts
        assert all(disk[part] == self.published[part] for part in found)


CatalogMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCatalogMachine = CatalogMachine.TestCase


@pytest.fixture
def tier(tmp_path: Path) -> DirTier:
    return DirTier(tmp_path, CAPACITY)


def test_find_ends_before_the_first_chunk_that_is_not_there(tier: DirTier) -> None:
    catalog = LocalCatalog(tier)
    keys = [part_id(i).key for i in range(4)]
    for number in (0, 1, 3):
        assert save(catalog, part_id(number))
    assert catalog.find(keys) == [(part_id(0).range,), (part_id(1).range,)]
    assert catalog.reserve(part_id(2), ALIGNMENT, 1.0)
    assert len(catalog.find(keys)) == 2, "being written is not there"
    store(tier, part_id(2), ALIGNMENT)
    catalog.publish(part_id(2))
    assert len(catalog.find(keys)) == 4


def test_a_chain_loses_its_tail_first_also_when_it_was_only_written(tier: DirTier) -> None:
    catalog = LocalCatalog(tier)
    chain = [part_id(i) for i in range(10)]
    keys = [part.key for part in chain]
    assert catalog.find(keys) == []  # whoever computes a prefix has looked for it
    for depth, part in enumerate(chain):
        assert save(catalog, part, weight=1.0 + depth)
    for left in range(9, 4, -1):
        assert save(catalog, part_id(100 + left), weight=100.0)
        assert len(catalog.find(keys)) == left
        catalog.check()


def test_a_part_of_a_chunk_can_go_alone(tier: DirTier) -> None:
    catalog = LocalCatalog(tier)
    key = part_id(0).key
    halves = [PartId(key, PartRange(0, 4, 0, 3)), PartId(key, PartRange(4, 8, 0, 3))]
    for half in halves:
        assert save(catalog, half, pages=4)
    assert catalog.find([key]) == [(halves[0].range, halves[1].range)]
    assert save(catalog, part_id(1), pages=4)
    assert catalog.find([key]) == [(halves[0].range,)]
    assert catalog.usage().evicted == 1


def test_restart_counts_what_is_there(tier: DirTier) -> None:
    first = LocalCatalog(tier)
    for number in range(6):
        assert save(first, part_id(number))
    again = LocalCatalog(tier)
    assert again.usage().used == 6 * ALIGNMENT
    assert len(again.find([part_id(i).key for i in range(6)])) == 6
    assert save(again, part_id(7), pages=8)
    assert again.usage().used <= CAPACITY
    again.check()


def age(tier: DirTier, part: PartId, seconds: float) -> None:
    (path,) = tier.folder.rglob(part.name)
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_tier_over_capacity_at_start_loses_its_oldest(tmp_path: Path, tier: DirTier) -> None:
    first = LocalCatalog(tier)
    for number in range(10):
        assert save(first, part_id(number))
        age(tier, part_id(number), 1000.0 - 10 * (number * 7 % 10))
    smaller = DirTier(tmp_path, 4 * ALIGNMENT)
    catalog = LocalCatalog(smaller)
    by_age = sorted(range(10), key=lambda number: number * 7 % 10)
    assert set(on_disk(smaller)) == {part_id(number) for number in by_age[6:]}
    assert catalog.usage().evicted == 6
    catalog.check()


def test_expired_parts_go_at_a_scan_and_when_time_has_passed(tier: DirTier) -> None:
    first = LocalCatalog(tier)
    for number in range(4):
        assert save(first, part_id(number))
    age(tier, part_id(0), 500.0)
    now = Time()
    catalog = LocalCatalog(tier, time_to_live=100.0, clock=now)
    assert set(on_disk(tier)) == {part_id(1), part_id(2), part_id(3)}
    now.now += 60
    assert holds(catalog, part_id(1))
    now.now += 60
    assert holds(catalog, part_id(1)), "it was used"
    assert not holds(catalog, part_id(2)), "it was not, and is not found even before it is swept"
    catalog.sweep()
    assert set(on_disk(tier)) == {part_id(1)}
    assert catalog.usage().used == ALIGNMENT


def test_what_cannot_be_deleted_stays_counted_and_is_tried_again(tier: DirTier) -> None:
    now = Time()
    faulty = FaultyTier(tier, FaultPlan())
    catalog = LocalCatalog(faulty, clock=now)
    for number in range(10):
        assert save(catalog, part_id(number))
    faulty.plan = FaultPlan(rates={Fault.DELETE_ERROR: 1.0})
    assert not save(catalog, part_id(20))
    assert not save(catalog, part_id(21)), "and nothing more is thrown away for it"
    assert catalog.usage().parts == 9
    assert catalog.usage().used == CAPACITY
    faulty.plan = FaultPlan()
    assert not save(catalog, part_id(20)), "not at once"
    now.now += RETRY_SECONDS
    assert save(catalog, part_id(20))
    catalog.check()


def test_a_tier_that_cannot_be_listed_stores_nothing_until_it_can(tier: DirTier) -> None:
    assert save(LocalCatalog(tier), part_id(0), pages=9)
    now = Time()
    faulty = FaultyTier(tier, FaultPlan(rates={Fault.SCAN_ERROR: 1.0}))
    catalog = LocalCatalog(faulty, clock=now)
    assert not save(catalog, part_id(1), pages=5)
    faulty.plan = FaultPlan()
    now.now += RETRY_SECONDS
    catalog.sweep()
    assert holds(catalog, part_id(0))
    assert save(catalog, part_id(1), pages=5)
    assert catalog.usage().used == 5 * ALIGNMENT


def test_room_is_not_made_when_it_would_not_do(tier: DirTier) -> None:
    catalog = LocalCatalog(tier)
    assert save(catalog, part_id(0), pages=3)
    assert catalog.reserve(part_id(1), 6 * ALIGNMENT, 1.0)
    assert not catalog.reserve(part_id(2), 5 * ALIGNMENT, 1.0)
    assert not catalog.reserve(part_id(2), 11 * ALIGNMENT, 1.0)
    assert holds(catalog, part_id(0)), "nothing was thrown away in vain"
    catalog.withdraw(part_id(1))
    assert catalog.reserve(part_id(2), 5 * ALIGNMENT, 1.0)


def test_the_heir_of_a_dead_owner_first_lets_others_finish(tier: DirTier) -> None:
    now = Time()
    catalog = LocalCatalog(tier, clock=now, quiet_until=now.now + 0.5)
    assert not catalog.reserve(part_id(0), ALIGNMENT, 1.0)
    assert catalog.adopt(part_id(1), ALIGNMENT, 1.0, "client")
    now.now += 0.5
    assert catalog.reserve(part_id(0), ALIGNMENT, 1.0)


def test_a_part_sealed_by_a_writer_who_then_died_is_kept(tier: DirTier) -> None:
    catalog = LocalCatalog(tier)
    assert catalog.reserve(part_id(0), ALIGNMENT, 1.0, "client")
    assert catalog.reserve(part_id(1), ALIGNMENT, 1.0, "client")
    store(tier, part_id(0), ALIGNMENT)
    catalog.abandon("client")
    assert catalog.usage().used == 2 * ALIGNMENT, "until somebody has looked"
    catalog.sweep()
    assert holds(catalog, part_id(0))
    assert catalog.usage().used == ALIGNMENT
    catalog.check()


def test_a_part_published_without_room_is_deleted(tier: DirTier) -> None:
    catalog = LocalCatalog(tier)
    store(tier, part_id(0), ALIGNMENT)
    catalog.publish(part_id(0))
    assert not holds(catalog, part_id(0))
    catalog.sweep()
    assert on_disk(tier) == {}


def test_a_drop_is_counted_once_and_leaves_a_rewrite_alone(tier: DirTier) -> None:
    catalog = LocalCatalog(tier)
    assert save(catalog, part_id(0))
    catalog.drop(part_id(0))
    catalog.drop(part_id(0))
    assert catalog.usage().dropped == 1
    assert catalog.usage().used == 0
    assert catalog.reserve(part_id(0), ALIGNMENT, 1.0)
    store(tier, part_id(0), ALIGNMENT)
    catalog.drop(part_id(0))  # of a reader that was late
    catalog.publish(part_id(0))
    assert on_disk(tier) == {part_id(0): ALIGNMENT}


class _SlowScan(FaultyTier):
    """Waits after listing, so that something can happen in between."""

    def __init__(self, inner: DirTier) -> None:
        super().__init__(inner, FaultPlan())
        self.listed, self.go_on, self.slow = threading.Event(), threading.Event(), False

    def scan(self):  # type: ignore[no-untyped-def]
        found: list[Scanned] = list(super().scan())
        if self.slow:
            self.listed.set()
            assert self.go_on.wait(250)
        return iter(found)


def test_a_part_deleted_while_the_tier_is_listed_does_not_come_back(tier: DirTier) -> None:
    slow = _SlowScan(tier)
    catalog = LocalCatalog(slow)
    assert save(catalog, part_id(0))
    assert catalog.reserve(part_id(1), ALIGNMENT, 1.0, "client")
    catalog.abandon("client")
    slow.slow = True
    sweeping = threading.Thread(target=catalog.sweep)
    sweeping.start()
    assert slow.listed.wait(250)
    catalog.drop(part_id(0))
    assert save(catalog, part_id(2)), "the catalog serves while it looks"
    slow.go_on.set()
    sweeping.join()
    assert not holds(catalog, part_id(0))
    assert catalog.usage().used == ALIGNMENT
    catalog.check()


def test_many_threads_never_exceed_the_capacity(tier: DirTier) -> None:
    catalog = LocalCatalog(tier)
    problems: list[str] = []

    def work(seed: int) -> None:
        for i in range(60):
            part = part_id(seed * 7 + i * 13 % 29)
            if catalog.reserve(part, (1 + i % 4) * ALIGNMENT, 1.0):
                store(tier, part, (1 + i % 4) * ALIGNMENT)
                if i % 5:
                    catalog.publish(part)
                else:
                    tier.delete(part)
                    catalog.withdraw(part)
            catalog.find([part_id(i % 29).key])
            try:
                catalog.check()
            except RuntimeError as error:
                problems.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert sum(on_disk(tier).values()) == catalog.usage().used <= CAPACITY
