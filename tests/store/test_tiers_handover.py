import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from parts_world import POOL, filled, load, part_id

from headrace.store.header import PartHeader, decode
from headrace.store.layout import HEADER_BYTES, KVLayout
from headrace.store.part import PartId, PartRange
from headrace.store.tiers.handover import HandoverReader
from headrace.store.tiers.memory import MemoryTier
from headrace.store.tiers.tier import PartMissing, TierError

LAYOUT = KVLayout("ab" * 32, layers=8, kv_heads=3, head_dim=16, dtype="float32", chunk_tokens=32)
PART = PartId(part_id(1).key, PartRange(2, 6, 0, 3))
RECORD = LAYOUT.record_bytes(3, 32)
NBYTES = LAYOUT.part_bytes(4, 3, 32)


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    made = MemoryTier("memory", 1 << 20, f"test-{os.getpid()}-handover")
    yield made
    assert os.listdir(made.folder / "writing") == []
    made.remove_all()
    assert POOL.in_use == 0


def record(layer: int) -> bytes:
    return bytes([layer]) * RECORD


def read(reader: HandoverReader, layer: int) -> bytes:
    with POOL.acquire(RECORD) as buffer:
        reader.read(layer, buffer.view)
        return bytes(buffer.view)


def test_layers_are_read_before_the_seal_by_the_one_who_knows(tier: MemoryTier) -> None:
    writer = tier.open_handover(PART, NBYTES, RECORD, "request-1")
    for token in ("request-2", ""):
        with pytest.raises(PartMissing, match="token"):
            tier.attach(PART, token)
    with pytest.raises(TierError, match="exists"):
        tier.open_handover(PART, NBYTES, RECORD, "request-1")
    sums = []
    with tier.attach(PART, "request-1") as reader:
        with pytest.raises(TierError, match="reader already"):
            tier.attach(PART, "request-1")
        for layer in (2, 4, 3, 5):
            assert not reader.ready(layer)
            with pytest.raises(TierError, match="to read yet"):
                read(reader, layer)
            with filled(record(layer)) as data:
                sums.append(writer.put_layer(layer, data))
            assert reader.ready(layer)
            assert read(reader, layer) == record(layer)
            with pytest.raises(PartMissing):
                load(tier, PART)
        assert list(tier.scan()) == []
        sums = [sums[0], sums[2], sums[1], sums[3]]
        with filled(PartHeader.of(LAYOUT, PART, 32, tuple(sums), time.time()).encode()) as data:
            writer.put(0, data)
        assert not reader.sealed
        writer.seal()
        assert reader.sealed
        assert read(reader, 2) == record(2)
    header = decode(load(tier, PART, 0, HEADER_BYTES))
    header.check(PART, LAYOUT)
    for layer in PART.range.layers:
        assert load(tier, PART, header.offset_of(layer), RECORD) == record(layer)
    with pytest.raises(PartMissing):
        tier.attach(PART, "request-1")


def test_another_reader_may_follow_one_that_left(tier: MemoryTier) -> None:
    with tier.open_handover(PART, NBYTES, RECORD, "t") as writer:
        with tier.attach(PART, "t"):
            pass
        with filled(record(2)) as data:
            writer.put_layer(2, data)
        with tier.attach(PART, "t") as reader:
            assert read(reader, 2) == record(2)


def test_a_reader_learns_that_the_writer_gave_up(tier: MemoryTier) -> None:
    writer = tier.open_handover(PART, NBYTES, RECORD, "t")
    with tier.attach(PART, "t") as reader:
        with filled(record(2)) as data:
            writer.put_layer(2, data)
            writer.abort()
            with pytest.raises(TierError, match="sealed or aborted"):
                writer.put_layer(3, data)
        assert reader.ready(2)
        with pytest.raises(TierError, match="given up"):
            reader.ready(3)
    with pytest.raises(PartMissing):
        tier.attach(PART, "t")


def test_a_part_with_a_layer_missing_is_not_published(tier: MemoryTier) -> None:
    writer = tier.open_handover(PART, NBYTES, RECORD, "t")
    with tier.attach(PART, "t") as reader, filled(record(2)) as data:
        writer.put_layer(2, data)
        with pytest.raises(TierError, match="lacks"):
            writer.seal()
        with pytest.raises(TierError, match="given up"):
            reader.ready(3)
    with pytest.raises(PartMissing):
        load(tier, PART)


def test_what_is_no_record_is_refused_and_a_damaged_one_noticed(tier: MemoryTier) -> None:
    with pytest.raises(TierError, match="not 4 layers"):
        tier.open_handover(PART, NBYTES + 4096, RECORD, "t")
    with tier.open_handover(PART, NBYTES, RECORD, "t") as writer, filled(record(2)) as data:
        for layer, nbytes in ((1, RECORD), (6, RECORD), (2, RECORD - 4096)):
            with pytest.raises(TierError, match="no record"):
                writer.put_layer(layer, data[:nbytes])
        writer.put_layer(2, data)
        with tier.attach(PART, "t") as reader:
            with pytest.raises(TierError, match="not in"):
                reader.ready(7)
            (path,) = (tier.folder / "writing").glob("*.part")
            with path.open("r+b") as file:
                file.seek(HEADER_BYTES + 17)
                file.write(b"\xff")
            with pytest.raises(TierError, match="checksum"):
                read(reader, 2)


def test_across_processes_and_a_killed_writer(tier: MemoryTier) -> None:
    program = """
import sys
sys.path.append(sys.argv[2])
from parts_world import filled
from test_tiers_handover import NBYTES, PART, RECORD, record
from headrace.store.tiers.memory import MemoryTier
writer = MemoryTier("memory", 1 << 20, sys.argv[1]).open_handover(PART, NBYTES, RECORD, "t")
for layer in (2, 3):
    with filled(record(layer)) as data:
        writer.put_layer(layer, data)
    print(layer, flush=True)
    sys.stdin.readline()
sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program, tier.folder.name, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == b"2\n"
        with tier.attach(PART, "t") as reader:
            assert read(reader, 2) == record(2)
            assert not reader.ready(3)
            assert list(tier.scan()) == []
            assert not reader.ready(3)  # the scan left it alone
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"3\n"
            assert read(reader, 3) == record(3)
            child.kill()
            child.wait()
            with pytest.raises(TierError, match="given up"):
                reader.ready(4)
    # The dead writer's name is free again, for the same hand-over.
    with tier.open_handover(PART, NBYTES, RECORD, "t") as writer, tier.attach(PART, "t") as reader:
        assert not reader.ready(2)
        with filled(record(2)) as data:
            writer.put_layer(2, data)
        assert read(reader, 2) == record(2)


def test_what_a_dead_hand_over_left_goes_with_a_scan(tier: MemoryTier) -> None:
    folder = tier.folder / "writing"
    (folder / "handover-x.part").touch()
    (folder / "handover-x.control").touch()
    assert list(tier.scan()) == []
    assert os.listdir(folder) == []


def test_layouts_of_other_sizes(tier: MemoryTier) -> None:
    for tokens in (1, 31):
        layout = dataclasses.replace(LAYOUT, chunk_tokens=tokens)
        size = layout.record_bytes(3, tokens)
        with (
            tier.open_handover(PART, layout.part_bytes(4, 3, tokens), size, "t") as writer,
            filled(bytes(size)) as data,
        ):
            writer.put_layer(5, data)
            with tier.attach(PART, "t") as reader:
                assert reader.ready(5)
