import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.store.catalog.local import LocalCatalog
from headrace.store.header import decode, record_sum
from headrace.store.layout import HEADER_BYTES, KVLayout
from headrace.store.part import PartId, PartRange
from headrace.store.part_save import PartSave
from headrace.store.save import SaveSpec
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.faulty import Fault, FaultPlan, FaultyTier
from headrace.store.write_gate import WriteGate
from headrace.store.writer import DeferredWriter

LAYOUT = KVLayout("a model", layers=3, kv_heads=1, head_dim=10, dtype="float32", chunk_tokens=32)
RANGE = PartRange(0, 3, 0, 1)
PAYLOAD = LAYOUT.payload_bytes(1, 32)
RECORD = LAYOUT.record_bytes(1, 32)
PART = LAYOUT.part_bytes(3, 1, 32)


class World:
    """A writer over tiers in folders, with reads that the test says."""

    def __init__(self, folder: Path, tiers: int = 1, limit: int = 1 << 20, idle_seconds: float = 0.0) -> None:
        self.quiet = threading.Event()
        self.quiet.set()
        self.tiers = [FaultyTier(DirTier(folder / str(i), 1 << 30, name=str(i))) for i in range(tiers)]
        self.catalogs = [LocalCatalog(tier) for tier in self.tiers]
        self.gate = WriteGate(self.quiet.wait, idle_seconds)
        self.unsaved: list[PartId] = []
        self.wrong: list[tuple[int, PartId]] = []
        self.writer = DeferredWriter(
            LAYOUT,
            self.tiers,
            self.catalogs,
            limit,
            self.gate,
            self.unsaved.append,
            lambda tier, part: self.wrong.append((tier, part)),
        )

    def save(self, number: int, pack: Callable[[int, memoryview], None] | None = None) -> PartSave | None:
        part = PartId(bytes([number]) * 32, RANGE)
        fill = pack or (lambda layer, record: record.__setitem__(slice(None), bytes([layer + 1]) * len(record)))
        return self.writer.save(SaveSpec(part, 32, 0, 1.0, b"salttag!"), fill, tuple(range(len(self.tiers))))

    def whole(self, number: int, pack: Callable[[int, memoryview], None] | None = None) -> PartSave | None:
        save = self.save(number, pack)
        for layer in range(3) if save else ():
            save.layer_ready(layer)
        return save

    def has(self, number: int, tier: int = 0) -> bool:
        return self.catalogs[tier].find([bytes([number]) * 32]) == [(RANGE,)]


@contextmanager
def world(folder: Path, tiers: int = 1, limit: int = 1 << 20, idle_seconds: float = 0.0) -> Iterator[World]:
    made = World(folder, tiers, limit, idle_seconds)
    yield made
    for tier in made.tiers:
        tier.release_stalls()
    made.writer.close()
    assert made.writer.buffers_in_use == 0
    assert made.writer.queue_bytes == 0
    for catalog in made.catalogs:
        catalog.check()
        assert catalog.usage().used == catalog.usage().parts * PART  # no room is held for what was not written


def soon(true: Callable[[], bool]) -> None:
    until, pause = time.monotonic() + 60, threading.Event()
    while not true():
        assert time.monotonic() < until
        pause.wait(0.005)


def test_a_part_is_a_header_and_records_with_clean_padding(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        for number in (1, 2):  # the second in the memory of the first
            assert w.whole(number)
            assert w.writer.flush(30)
        (path,) = tmp_path.rglob(f"{'02' * 32}*.kv")
        data = path.read_bytes()
        assert len(data) == PART
        header = decode(data[:HEADER_BYTES])
        header.check(PartId(b"\2" * 32, RANGE), LAYOUT)
        assert (header.n_tokens, header.salt_tag) == (32, b"salttag!")
        for layer in range(3):
            record = data[header.offset_of(layer) :][:RECORD]
            assert record == bytes([layer + 1]) * PAYLOAD + bytes(RECORD - PAYLOAD)
            assert header.sum_of(layer) == record_sum(memoryview(record))


def test_packed_turns_true_when_the_last_layer_was_packed_and_not_before(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        save = w.save(1)
        assert save is not None
        save.layer_ready(2)
        save.layer_ready(0)
        save.layer_ready(0)
        assert w.writer.flush(30)
        assert not save.packed
        assert not w.has(1)
        save.layer_ready(1)
        assert w.writer.flush(30)
        assert save.packed
        assert w.has(1)
        save.cancel()  # too late
        assert w.has(1)


def test_a_cancelled_save_leaves_nothing(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        early = w.save(1)
        assert early is not None
        early.layer_ready(0)
        early.cancel()
        early.cancel()
        assert early.packed
        early.layer_ready(1)
        w.quiet.clear()  # nothing is written
        late = w.whole(2)
        assert late is not None
        soon(lambda: late.packed)
        late.cancel()
        w.quiet.set()
        assert w.writer.flush(30)
        assert not w.has(1)
        assert not w.has(2)
        assert w.writer.events["cancelled"] == 2
        assert [part.key[0] for part in w.unsaved] == [1, 2]


def test_cancel_during_a_pack_ends_with_it(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def pack(layer: int, record: memoryview) -> None:
        begun.set()
        go_on.wait(60)
        record[:] = bytes(len(record))  # the memory must still be ours

    with world(tmp_path) as w:
        save = w.whole(1, pack)
        assert save is not None
        begun.wait(60)
        save.cancel()
        assert not save.packed
        go_on.set()
        assert w.writer.flush(30)
        assert save.packed
        assert not w.has(1)


def test_a_pack_that_raises_costs_its_part_only(tmp_path: Path) -> None:
    def pack(layer: int, record: memoryview) -> None:
        raise RuntimeError("broken")

    with world(tmp_path) as w:
        save = w.whole(1, pack)
        assert w.whole(2)
        assert w.writer.flush(30)
        assert save is not None
        assert save.packed
        assert not w.has(1)
        assert w.has(2)


def test_memory_is_bounded_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with world(tmp_path, limit=3 * PART) as w:
        w.quiet.clear()
        saves = [w.whole(number) for number in range(1, 5)]
        assert [save is not None for save in saves] == [True, True, True, False]
        assert w.writer.queue_bytes == 3 * PART
        assert w.save(1) is None  # on its way already
        w.quiet.set()
        assert w.writer.flush(30)
        assert [w.has(number) for number in range(1, 5)] == [True, True, True, False]
        assert w.whole(4)
        assert w.writer.flush(30)


def test_a_tier_that_stalls_holds_up_itself_only_and_is_sent_no_more(tmp_path: Path) -> None:
    with world(tmp_path, tiers=2, limit=8 * PART) as w:
        w.tiers[0].plan = FaultPlan(rates={Fault.WRITE_STALL: 1.0})
        for number in range(1, 6):
            assert w.whole(number)
        soon(lambda: all(w.has(number, 1) for number in range(1, 6)))
        assert not w.writer.writable(0)
        assert w.writer.writable(1)
        assert not w.writer.flush(0.05)
        w.tiers[0].release_stalls()
        assert w.writer.flush(30)
        assert w.writer.writable(0)
        assert all(w.has(number, 0) for number in range(1, 6))


@pytest.mark.parametrize("kind", [Fault.WRITE_ERROR, Fault.SEAL_ERROR, Fault.FULL])
def test_what_fails_on_one_tier_reaches_the_other_and_gives_its_room_back(tmp_path: Path, kind: Fault) -> None:
    with world(tmp_path, tiers=2) as w:
        w.tiers[0].plan = FaultPlan(calls={kind: [0]})
        w.whole(1)
        assert w.writer.flush(30)
        assert (w.has(1, 0), w.has(1, 1)) == (False, True)
        assert w.writer.degraded(0) == (kind is Fault.FULL)
        assert w.writer.counts[0].errors == 1
        assert not w.unsaved
        soon(lambda: w.writer.writable(0))
        w.whole(2)
        assert w.writer.flush(30)
        assert (w.has(2, 0), w.has(2, 1)) == (True, True)
        assert w.writer.events["saved_bytes"] == 2 * PART


def test_a_catalog_that_breaks_its_word_does_not_end_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path) as w:
        with monkeypatch.context() as broken:
            broken.setattr(w.catalogs[0], "reserve", lambda *_: 1 / 0)
            w.whole(1)
            assert w.writer.flush(30)
        w.whole(2)
        assert w.writer.flush(30)
        assert (w.has(1), w.has(2)) == (False, True)
        assert w.unsaved == [PartId(b"\1" * 32, RANGE)]


def test_writes_flow_during_forward_passes_and_when_idle_and_never_ahead_of_reads(tmp_path: Path) -> None:
    with world(tmp_path, idle_seconds=1000.0) as w:
        w.gate.forward(True)
        w.gate.forward(False)  # an engine between two passes
        w.whole(1)
        soon(lambda: not w.writer._to_pack)
        assert not w.has(1)
        w.quiet.clear()
        w.gate.forward(True)
        assert not w.has(1)  # somebody reads
        w.quiet.set()
        soon(lambda: w.has(1))
        w.gate.forward(False)
        w.whole(2)
        assert w.writer.flush(30)  # whatever
        assert w.has(2)
    with world(tmp_path / "idle", idle_seconds=0.02) as w:
        w.gate.forward(True)
        w.gate.forward(False)
        w.whole(1)
        soon(lambda: w.has(1))


def test_closing_gives_up_what_waits_and_frees_its_owners(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        w.quiet.clear()
        unready, ready = w.save(1), w.whole(2)
        w.writer.close()
        w.writer.close()
        assert unready is not None
        assert unready.packed
        assert ready is not None
        assert w.save(3) is None
        unready.layer_ready(0)


def test_a_chunk_costs_the_interpreter_little(tmp_path: Path) -> None:
    """30 layers as of the default model; CPU seconds without what packing copies and writing moves."""
    layout = KVLayout("x", layers=30, kv_heads=1, head_dim=16, dtype="float32", chunk_tokens=16)
    with world(tmp_path, limit=64 << 20) as w:
        source = np.zeros(layout.payload_bytes(1, 16), np.uint8)
        writer = DeferredWriter(
            layout, w.tiers, w.catalogs, 64 << 20, w.gate, w.unsaved.append, lambda tier, part: None
        )
        begun = time.process_time()
        for number in range(50):
            part = PartId(bytes([number]) * 32, PartRange(0, 30, 0, 1))
            save = writer.save(
                SaveSpec(part, 16, 0, 1.0), lambda layer, record: record.__setitem__(slice(None), source), (0,)
            )
            assert save is not None
            for layer in range(30):
                save.layer_ready(layer)
        assert writer.flush(60)
        each = (time.process_time() - begun) / 50
        writer.close()
        print(f"{each * 1e3:.2f} ms per chunk")
        assert each < 0.02
        for number in range(50):
            w.catalogs[0].drop(PartId(bytes([number]) * 32, PartRange(0, 30, 0, 1)))
