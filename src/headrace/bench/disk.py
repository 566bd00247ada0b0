"""What a tier's disk gives by itself: parts read past the page cache at the tier's depth, nothing done to them."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from headrace.store.buffers import BufferPool, size_class
from headrace.store.tiers.tier import Scanned, Tier

#: Bytes of a read where a disk's rate is wanted: more at once gives no more.
READ_BYTES = 1 << 20


def drop_page_cache(folder: Path) -> None:
    """Take every file below a folder out of the page cache, as if the machine had been started anew."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if not os.path.isfile(path):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)  # what is not on the disk yet cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def read_rate(tier: Tier, parts: Sequence[Scanned], unit_bytes: int = READ_BYTES) -> float:
    """Bytes per second at which a tier gives whole parts, `tier.depth` reads in flight.

    Args:
        tier: where they lie.
        parts: which, from `Tier.scan`.
        unit_bytes: bytes of a read.

    Raises:
        TierError: one cannot be read.
    """
    units: SimpleQueue[tuple[Scanned, int]] = SimpleQueue()
    for part in parts:
        for offset in range(0, part.nbytes, unit_bytes):
            units.put((part, offset))
    failed: list[BaseException] = []

    def work(memory: memoryview) -> None:
        try:
            while not failed:
                part, offset = units.get_nowait()
                tier.read(part.part, offset, memory[: min(unit_bytes, part.nbytes - offset)])
        except Empty:
            return
        except BaseException as error:
            failed.append(error)

    pool = BufferPool(tier.depth * size_class(unit_bytes))
    buffers = [pool.acquire(unit_bytes) for _ in range(tier.depth)]
    threads = [threading.Thread(target=work, args=(buffer.view,)) for buffer in buffers]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    for buffer in buffers:
        buffer.release()
    pool.close()
    if failed:
        raise failed[0]
    return sum(part.nbytes for part in parts) / seconds
