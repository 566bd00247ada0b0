"""Parts with known content, and aligned memory to read them into."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from headrace.store.buffers import BufferPool
from headrace.store.layout import ALIGNMENT
from headrace.store.part import PartId, PartRange
from headrace.store.tiers.tier import Tier

PART_BYTES = 9 * ALIGNMENT
POOL = BufferPool(64 << 20)


def part_id(number: int) -> PartId:
    return PartId(blake2b(str(number).encode(), digest_size=32).digest(), PartRange(0, 8, 0, 3))


def content(part: PartId, nbytes: int = PART_BYTES) -> bytes:
    return (part.key * (nbytes // 32 + 1))[:nbytes]


@contextmanager
def filled(data: bytes) -> Iterator[memoryview]:
    with POOL.acquire(len(data)) as buffer:
        buffer.view[:] = data
        yield buffer.view


def store(tier: Tier, part: PartId, nbytes: int = PART_BYTES) -> None:
    with filled(content(part, nbytes)) as data, tier.create(part, nbytes) as writer:
        half = nbytes // 2 // ALIGNMENT * ALIGNMENT
        writer.put(half, data[half:])
        if half:
            writer.put(0, data[:half])
        writer.seal()


def load(tier: Tier, part: PartId, offset: int = 0, nbytes: int = PART_BYTES) -> bytes:
    with POOL.acquire(nbytes) as buffer:
        tier.read(part, offset, buffer.view)
        return bytes(buffer.view)
