import os
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.store import tier_speed
from headrace.store.buffers import BufferPool
from headrace.store.header import PartHeader, record_sum
from headrace.store.layout import HEADER_BYTES, KVLayout
from headrace.store.load import Deliver, FoundChunk, FoundPart, LoadFailed, records_in
from headrace.store.native.library import NativeCopy, copy_rows
from headrace.store.part import PartId, PartRange
from headrace.store.reader import Reader, read_memory
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.faulty import Fault, FaultPlan, FaultyTier
from headrace.store.tiers.tier import Tier

LAYOUT = KVLayout("f" * 64, layers=6, kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=32)
FULL = PartRange(0, 6, 0, 2)
UNIT = 2 * LAYOUT.record_bytes(2, 32)
WAIT = 200.0  # for threads of a machine that may stand still for minutes


class World:
    """Two folders with parts of known content, and what was delivered of them."""

    def __init__(self, root: Path) -> None:
        self.tiers = [FaultyTier(DirTier(root / name, 1 << 30, name=name)) for name in ("fast", "slow")]
        self.data: dict[tuple[PartId, int], bytes] = {}
        self.got: Counter[tuple[int, PartId, int]] = Counter()
        self.wrong: list[tuple[int, PartId, int]] = []
        self.bad: Counter[tuple[int, PartId, bool]] = Counter()
        self.buffers = BufferPool(read_memory(self.tiers, LAYOUT, UNIT))
        self.readers: list[Reader] = []
        self.lock = threading.Lock()

    def reader(
        self, policy: str = "completion", buffers: BufferPool | None = None, tiers: Sequence[Tier] = ()
    ) -> Reader:
        buffers = buffers or self.buffers
        reader = Reader(tiers or self.tiers, LAYOUT, policy, unit_bytes=UNIT, buffers=buffers, on_bad=self.on_bad)
        self.readers.append(reader)
        return reader

    def on_bad(self, tier: int, part: PartId, missing: bool) -> None:
        with self.lock:
            self.bad[tier, part, missing] += 1

    def deliver(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
        with self.lock:
            for layer, record in records_in(first, last, records, len(self.data[part, first])):
                self.got[chunk, part, layer] += 1
                if bytes(record) != self.data[part, layer]:
                    self.wrong.append((chunk, part, layer))

    def chunk(
        self,
        number: int,
        tiers: tuple[int, ...] = (0, 1),
        ranges: tuple[PartRange, ...] = (FULL,),
        n_tokens: int = 32,
        layout: KVLayout = LAYOUT,
        seed: int | None = None,
    ) -> FoundChunk:
        """Write a chunk; with a seed its content is another than by its number."""
        key = number.to_bytes(32, "big")
        parts = []
        for area in ranges:
            part = PartId(key, area)
            records = self.records(part, n_tokens, number if seed is None else seed)
            for tier in tiers:
                write_part(self.tiers[tier], layout, part, n_tokens, records)
            parts.append(FoundPart(area, tiers))
        return FoundChunk(key, n_tokens, tuple(parts))

    def records(self, part: PartId, n_tokens: int, seed: int) -> list[bytes]:
        rng = np.random.default_rng((seed, *part.range))
        size = LAYOUT.payload_bytes(len(part.range.heads), n_tokens)
        records = [rng.bytes(size) for _ in part.range.layers]
        self.data.update({(part, layer): record for layer, record in zip(part.range.layers, records)})
        return records

    def check(self, chunks: int, times: int = 1) -> None:
        """The first chunks were delivered whole, and nothing wrong ever was."""
        assert self.wrong == []
        assert all(count <= times for count in self.got.values())
        for number in range(chunks):
            assert sum(count for (chunk, _, _), count in self.got.items() if chunk == number) >= 6

    def file(self, tier: int, part: PartId) -> Path:
        folder = self.tiers[tier].folder
        assert folder is not None
        return next(folder.rglob(part.name))

    def close(self) -> None:
        for tier in self.tiers:
            tier.release_stalls()
        for reader in self.readers:
            reader.close()
        for tier in self.tiers:
            tier.close()
        assert self.buffers.in_use == 0, "a buffer leaked"


def write_part(tier: Tier, layout: KVLayout, part: PartId, n_tokens: int, records: list[bytes]) -> None:
    size = layout.record_bytes(len(part.range.heads), n_tokens)
    nbytes = layout.part_bytes(len(part.range.layers), len(part.range.heads), n_tokens)
    pool = BufferPool(1 << 24)
    with pool.acquire(nbytes) as buffer:
        buffer.view[:] = bytes(nbytes)
        for place, record in enumerate(records):
            at = HEADER_BYTES + place * size
            buffer.view[at : at + len(record)] = record
        sums = tuple(record_sum(buffer.view[HEADER_BYTES + place * size :][:size]) for place in range(len(records)))
        buffer.view[:HEADER_BYTES] = PartHeader.of(layout, part, n_tokens, sums, 0.0).encode()
        with tier.create(part, nbytes) as writer:
            writer.put(0, buffer.view)
            writer.seal()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.mark.parametrize("policy", ["completion", "static", "sequential"])
def test_a_load_delivers_every_record_once(world: World, policy: str) -> None:
    reader = world.reader(policy)
    chunks = [world.chunk(number) for number in range(8)] + [world.chunk(8, n_tokens=5)]
    load = reader.load(chunks, FULL, world.deliver)
    for layer in range(6):
        load.wait(layer)
        assert load.ready(layer)
    load.wait_all()
    assert load.done
    assert not load.failed
    assert load.good_chunks == 9
    world.check(9)
    assert len(world.got) == 9 * 6
    needed = 8 * 6 * LAYOUT.record_bytes(2, 32) + 6 * LAYOUT.record_bytes(2, 5)
    assert sum(load.bytes_by_tier()) == needed
    reads = reader.reads()
    assert sum(r.nbytes - r.late_bytes for r in reads) == needed
    # A header is read once for a part, or twice when two tiers begin with it at the same time.
    assert 9 * HEADER_BYTES <= sum(r.header_bytes for r in reads) <= 18 * HEADER_BYTES
    assert not reader.reading
    assert reader.wait_quiet(0)


def test_several_loads_at_once_share_the_tiers(world: World) -> None:
    reader = world.reader()
    got: list[Counter[int]] = [Counter(), Counter()]

    def into(number: int) -> Deliver:
        def deliver(chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
            world.deliver(chunk, part, first, last, records)
            got[number].update(range(first, last))

        return deliver

    loads = reader.load_batch(
        [([world.chunk(10 * n + c) for c in range(3)], FULL, into(n)) for n in range(2)] + [([], FULL, world.deliver)]
    )
    for load in loads:
        load.wait_all()
    assert got == [Counter(dict.fromkeys(range(6), 3))] * 2
    assert [load.good_chunks for load in loads] == [3, 3, 0]
    world.check(0)


def test_only_wanted_layers_are_read_and_pieces_are_joined(world: World) -> None:
    reader = world.reader()
    front, back = PartRange(0, 4, 0, 2), PartRange(3, 6, 0, 2)
    whole, pieces = world.chunk(1), world.chunk(2, ranges=(front, back))
    pieces = replace(
        pieces,
        parts=(
            replace(pieces.parts[0], read=PartRange(1, 4, 0, 2)),
            replace(pieces.parts[1], read=PartRange(4, 5, 0, 2)),
        ),
    )
    load = reader.load([whole, pieces], PartRange(1, 5, 0, 2), world.deliver)
    load.wait_all()
    assert load.ready(0), "not wanted, so there is nothing to wait for"
    assert load.ready(5)
    assert sorted((chunk, layer) for chunk, _, layer in world.got) == [(c, n) for c in range(2) for n in range(1, 5)]
    assert sum(load.bytes_by_tier()) == 8 * LAYOUT.record_bytes(2, 32)
    world.check(0)


def test_a_part_on_one_tier_only_comes_from_there(world: World) -> None:
    reader = world.reader()
    chunks = [world.chunk(number, tiers=(number % 2,)) for number in range(6)]
    load = reader.load(chunks, FULL, world.deliver)
    load.wait_all()
    assert load.bytes_by_tier() == (18 * LAYOUT.record_bytes(2, 32),) * 2


class Native:
    """Delivers by machine code: each unit has its memory, into which all attempts at it would copy."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memory: dict[tuple[int, PartId, int], bytearray] = {}
        self.lock = threading.Lock()

    def __call__(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
        raise AssertionError("there is machine code")

    def copy(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> NativeCopy:
        with self.lock:
            target = self.memory.setdefault((chunk, part, first), bytearray(len(records)))
        return copy_rows(records, memoryview(target), len(records) // (last - first), last - first)

    def arrived(self, chunk: int, part: PartId, first: int, last: int) -> None:
        self.world.deliver(chunk, part, first, last, memoryview(self.memory[chunk, part, first]))


@pytest.fixture(params=["in one call", "in two"])
def native(request: pytest.FixtureRequest, world: World) -> tuple[Native, Reader]:
    """With tiers that settle what they read, and with tiers that only read."""
    plain = [tier.inner for tier in world.tiers]
    return Native(world), world.reader(tiers=plain if request.param == "in one call" else world.tiers)


def test_machine_code_copies_every_record_once(world: World, native: tuple[Native, Reader]) -> None:
    deliver, reader = native
    chunks = [world.chunk(number) for number in range(8)] + [world.chunk(8, n_tokens=5)]
    load = reader.load(chunks, FULL, deliver)
    for layer in range(6):
        load.wait(layer)
        assert all(world.got[chunk, PartId(chunks[chunk].key, FULL), layer] == 1 for chunk in range(9))
    load.wait_all()
    world.check(9)
    assert sum(load.bytes_by_tier()) == 8 * 6 * LAYOUT.record_bytes(2, 32) + 6 * LAYOUT.record_bytes(2, 5)


def test_machine_code_copies_nothing_wrong_and_other_tiers_help(world: World, native: tuple[Native, Reader]) -> None:
    deliver, reader = native
    chunks = [world.chunk(number) for number in range(6)]
    for chunk, tiers in ((2, (0,)), (4, (0, 1))):
        for tier in tiers:
            file = world.file(tier, PartId(chunks[chunk].key, FULL))
            blob = bytearray(file.read_bytes())
            blob[HEADER_BYTES + 3 * LAYOUT.record_bytes(2, 32) + 7] ^= 1
            file.write_bytes(blob)
    lost = PartId(chunks[4].key, FULL)
    for _ in range(10):
        world.got.clear()
        load = reader.load(chunks, FULL, deliver)
        with pytest.raises(LoadFailed, match="cannot be had"):
            load.wait_all()
        assert load.good_chunks == 4
        world.check(4)
        assert world.got[4, lost, 2] == world.got[4, lost, 3] == 0, "they are one unit, and one of them is wrong"
        assert not any(deliver.memory[4, lost, 2])


def test_machine_code_copies_nothing_after_a_cancel(world: World, native: tuple[Native, Reader]) -> None:
    _, reader = native
    chunks = [world.chunk(number) for number in range(6)]
    rng = random.Random(2)
    seen = []
    for round in range(40):
        deliver = Native(world)
        load = reader.load(chunks, FULL, deliver)
        if round % 4:
            load.wait(rng.randrange(6))
        load.cancel()
        assert load.done
        seen.append((deliver, {unit: bytes(memory) for unit, memory in deliver.memory.items()}))
    reader.close()
    for deliver, before in seen:
        for unit, memory in deliver.memory.items():
            assert bytes(memory) == before.get(unit, bytes(len(memory)))
    assert world.wrong == []


FAULTS = {
    "read errors": FaultPlan(1, {Fault.READ_ERROR: 0.2}),
    "short reads": FaultPlan(2, {Fault.SHORT_READ: 0.2}),
    "flipped bits": FaultPlan(3, {Fault.FLIPPED_BIT: 0.3}),
    "missing": FaultPlan(4, {Fault.MISSING: 0.2}),
    "stalls": FaultPlan(5, {Fault.READ_STALL: 0.1}, stall=0.02),
    "everything": FaultPlan(
        6,
        {
            Fault.READ_ERROR: 0.1,
            Fault.SHORT_READ: 0.1,
            Fault.FLIPPED_BIT: 0.2,
            Fault.MISSING: 0.1,
            Fault.READ_STALL: 0.1,
        },
        stall=0.02,
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("faulty", [(0,), (0, 1)])
def test_whatever_fails_nothing_wrong_is_delivered(world: World, kind: str, faulty: tuple[int, ...]) -> None:
    reader = world.reader()
    chunks = [world.chunk(number) for number in range(6)]
    for tier in faulty:
        world.tiers[tier].plan = replace(FAULTS[kind], seed=10 * FAULTS[kind].seed + tier)
    failures = 0
    for _ in range(8):
        world.got.clear()
        load = reader.load(chunks, FULL, world.deliver)
        good = 6
        try:
            load.wait_all()
        except LoadFailed as failure:
            failures += 1
            good = failure.good_chunks
        assert load.good_chunks == good
        assert load.done
        assert load.failed == (load.good_chunks < 6)
        world.check(load.good_chunks)
    assert failures == 0 or faulty == (0, 1), "the other tier has everything"
    assert sum(tier.injected.total() for tier in world.tiers) > 0


def test_a_stalled_tier_is_overtaken_and_its_memory_stays_its_own(world: World) -> None:
    reader = world.reader()
    chunks = [world.chunk(number) for number in range(6)]
    reader.load(chunks, FULL, world.deliver).wait_all()  # both tiers' speeds are known now
    world.got.clear()
    world.tiers[1].plan = FaultPlan(0, {Fault.READ_STALL: 1.0})
    pause = threading.Event()

    def deliver(chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
        while not world.tiers[1].injected:  # until the slow tier has taken something
            pause.wait(0.001)
        world.deliver(chunk, part, first, last, records)

    load = reader.load(chunks, FULL, deliver)
    load.wait_all()
    world.check(6)
    assert load.bytes_by_tier()[1] == 0
    assert not reader.reading, "nobody waits for the late ones"
    held = world.buffers.in_use
    assert held >= 1, "the late reads still have their memory"
    late = sum(r.late_units for r in reader.reads())
    world.tiers[1].release_stalls()
    reader.close()
    assert sum(r.late_units for r in reader.reads()) > late
    world.check(6)


def test_a_failed_load_says_how_far_it_came_and_what_is_wrong_is_reported_once(world: World) -> None:
    reader = world.reader()
    chunks = [world.chunk(number) for number in range(5)]
    gone = PartId(chunks[3].key, FULL)
    world.file(0, gone).unlink()
    damaged = world.file(1, gone)
    blob = bytearray(damaged.read_bytes())
    blob[HEADER_BYTES + 100] ^= 4
    damaged.write_bytes(blob)
    load = reader.load(chunks, FULL, world.deliver)
    with pytest.raises(LoadFailed, match=r"cannot be had") as failure:
        load.wait_all()
    assert failure.value.good_chunks == 3
    assert load.done
    assert load.failed
    with pytest.raises(LoadFailed):
        load.wait(0)
    world.check(3)
    reader.close()  # what is wrong is reported once others may go on
    assert world.bad[0, gone, True] == 1
    assert world.bad[1, gone, False] == 1
    assert set(world.bad) <= {(0, gone, True), (1, gone, False)}


@pytest.mark.parametrize("what", ["truncated", "empty", "another chunk", "another model", "fewer tokens", "header"])
def test_what_is_not_the_part_is_a_miss(world: World, what: str) -> None:
    reader = world.reader()
    chunk = world.chunk(1)
    part = PartId(chunk.key, FULL)
    file = world.file(0, part)
    blob = bytearray(file.read_bytes())
    if what == "truncated":
        file.write_bytes(blob[:-4096])
    elif what == "empty":
        file.write_bytes(b"")
    elif what == "another chunk":
        file.write_bytes(world.file(0, PartId(world.chunk(2).key, FULL)).read_bytes())
    elif what == "another model":
        world.chunk(1, tiers=(0,), layout=replace(LAYOUT, fingerprint="e" * 64), seed=99)
    elif what == "fewer tokens":
        world.chunk(1, tiers=(0,), n_tokens=31, seed=99)
    else:
        blob[40] ^= 1
        file.write_bytes(blob)
    world.records(part, 32, 1)
    for _ in range(4):
        reader.load([chunk], FULL, world.deliver).wait_all()
    assert world.wrong == []


@pytest.mark.parametrize("kept", [0, HEADER_BYTES, HEADER_BYTES + 100])
def test_a_truncated_part_is_reported_and_its_tier_goes_on(world: World, kept: int) -> None:
    reader = world.reader()
    chunks = [world.chunk(number, tiers=(0,)) for number in range(6)]
    for chunk in chunks[:5]:
        os.truncate(world.file(0, PartId(chunk.key, FULL)), kept)
        with pytest.raises(LoadFailed):
            reader.load([chunk], FULL, world.deliver).wait_all()
    assert reader.degraded() == (False, False)
    reader.load(chunks[5:], FULL, world.deliver).wait_all()
    reader.close()
    assert world.bad == {(0, PartId(chunk.key, FULL), False): 1 for chunk in chunks[:5]}


def test_tiers_whose_parts_were_computed_separately_are_both_right(world: World) -> None:
    reader = world.reader()
    chunk = world.chunk(1, tiers=(0,))
    first = dict(world.data)
    world.chunk(1, tiers=(1,), seed=7)
    second = dict(world.data)

    def deliver(chunk: int, part: PartId, begin: int, end: int, records: memoryview) -> None:
        for layer, record in records_in(begin, end, records, len(first[part, begin])):
            world.got[chunk, part, layer] += 1
            if bytes(record) not in (first[part, layer], second[part, layer]):
                world.wrong.append((chunk, part, layer))

    for _ in range(20):
        reader.load([chunk] * 3, FULL, deliver).wait_all()
    assert world.wrong == []
    assert not world.bad


def test_loads_cancelled_at_random_moments_leave_nothing(world: World) -> None:
    reader = world.reader()
    chunks = [world.chunk(number) for number in range(6)]
    rng = random.Random(1)
    world.tiers[0].plan = FaultPlan(1, {Fault.READ_STALL: 0.1, Fault.READ_ERROR: 0.05}, stall=0.01)
    for round in range(30):
        over = threading.Event()
        started = threading.Event()

        def deliver(
            chunk: int, part: PartId, first: int, last: int, records: memoryview, over=over, started=started
        ) -> None:
            assert not over.is_set(), "delivered after the cancel returned"
            world.deliver(chunk, part, first, last, records)
            started.set()

        loads = reader.load_batch([(chunks, FULL, deliver), (chunks[:2], FULL, deliver)])
        if round % 3:
            started.wait(WAIT)
        for load in rng.sample(loads, 2):
            load.cancel()
            load.cancel()
            assert load.done
        over.set()
        if loads[0].good_chunks < 6:
            with pytest.raises(LoadFailed):
                loads[0].wait_all()
    assert not reader.reading
    assert world.wrong == []
    reader.load(chunks, FULL, world.deliver).wait_all()


def fail_until_degraded(world: World, reader: Reader) -> FoundChunk:
    alone = world.chunk(7, tiers=(1,))
    world.tiers[1].down = True
    for _ in range(3):
        with pytest.raises(LoadFailed, match="slow"):
            reader.load([alone], PartRange(0, 2, 0, 2), world.deliver).wait_all()
    return alone


def test_a_tier_that_is_down_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_speed, "FIRST_PAUSE", 1e9)
    monkeypatch.setattr(tier_speed, "LONGEST_PAUSE", 1e9)
    reader = world.reader()
    chunks = [world.chunk(number) for number in range(6)]
    alone = fail_until_degraded(world, reader)
    assert reader.degraded() == (False, True)
    errors = reader.reads()[1].errors
    with pytest.raises(LoadFailed, match="slow"):
        reader.load([alone], FULL, world.deliver).wait_all()
    reader.load(chunks, FULL, world.deliver).wait_all()
    assert reader.reads()[1].errors == errors, "it was not even asked"


def test_a_tier_that_was_down_comes_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_speed, "FIRST_PAUSE", 0.01)
    reader = world.reader()
    alone = fail_until_degraded(world, reader)
    world.tiers[1].down = False
    while True:  # until the pause is over
        load = reader.load([alone], FULL, world.deliver)
        try:
            load.wait_all()
            break
        except LoadFailed:
            assert load.good_chunks == 0
    assert reader.degraded() == (False, False)
    assert world.wrong == []


def test_a_delivery_that_raises_fails_its_load_only(world: World) -> None:
    reader = world.reader()
    chunks = [world.chunk(number) for number in range(3)]

    def deliver(chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
        if chunk == 1:
            raise ZeroDivisionError("a fault of ours")

    bad, good = reader.load_batch([(chunks, FULL, deliver), (chunks, FULL, world.deliver)])
    with pytest.raises(LoadFailed, match="a fault of ours") as failure:
        bad.wait_all()
    assert isinstance(failure.value.__cause__, ZeroDivisionError)
    assert bad.good_chunks == 1
    good.wait_all()
    world.check(3)


def test_closing_ends_those_who_wait(world: World) -> None:
    reader = world.reader()
    chunks = [world.chunk(number) for number in range(3)]
    for tier in world.tiers:
        tier.plan = FaultPlan(0, {Fault.READ_STALL: 1.0})
    load = reader.load(chunks, FULL, world.deliver)
    failures: list[str] = []

    def wait() -> None:
        try:
            load.wait_all()
        except LoadFailed as failure:
            failures.append(str(failure))

    waiting = threading.Thread(target=wait)
    waiting.start()
    closing = threading.Thread(target=reader.close)
    closing.start()
    waiting.join(WAIT)
    for tier in world.tiers:
        tier.release_stalls()
    closing.join(WAIT)
    assert failures == ["the store is closed"]
    with pytest.raises(LoadFailed, match="closed"):
        reader.load(chunks, FULL, world.deliver).wait_all()
    assert not world.wrong


def test_threads_are_started_as_there_is_work_and_units_wait_for_scarce_memory(world: World) -> None:
    scarce = BufferPool(read_memory(world.tiers[:1], LAYOUT, UNIT) // 4 + 1)
    reader = world.reader(buffers=scarce)
    name = "read "
    before = sum(thread.name.startswith(name) for thread in threading.enumerate())
    reader.load([world.chunk(0)], PartRange(0, 2, 0, 2), world.deliver).wait_all()
    assert sum(thread.name.startswith(name) for thread in threading.enumerate()) - before <= 2
    chunks = [world.chunk(number) for number in range(10)]
    reader.load(chunks, FULL, world.deliver).wait_all()
    depth = sum(tier.depth for tier in world.tiers)
    assert sum(thread.name.startswith(name) for thread in threading.enumerate()) - before <= depth
    reader.close()
    assert scarce.in_use == 0
