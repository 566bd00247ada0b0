"""Looking after what lies in tiers, with or without a server that uses them: list, verify, collect, purge.

Parts go through the catalog, so that a server that owns the tier knows.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.store.buffers import Buffer, BufferPool
from headrace.store.catalog.catalog import Catalog
from headrace.store.header import BadHeader, PartHeader, decode, record_sum
from headrace.store.keys import salt_tag
from headrace.store.layout import HEADER_BYTES, aligned
from headrace.store.tiers.tier import PartCutShort, PartMissing, Scanned, Tier, TierError

#: Bytes read at once.
_SLICE = 4 << 20


@dataclass(frozen=True, slots=True)
class Inspected:
    """A part that lies in a tier.

    Attributes:
        scanned: its name, size and age.
        header: what it says of itself; None when that is wrong.
        problem: what is wrong with it; empty when nothing is.
        unreadable: the tier failed, so nobody knows what is wrong with the part.
    """

    scanned: Scanned
    header: PartHeader | None
    problem: str = ""
    unreadable: bool = False


class Inspector:
    """Reads parts of a tier whatever model they are of; a context manager.

    Args:
        tier: the tier.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._pool = BufferPool(2 * _SLICE)
        self._buffer: Buffer = self._pool.acquire(_SLICE)

    def __enter__(self) -> "Inspector":
        return self

    def __exit__(self, *error: object) -> None:
        self._buffer.release()
        self._pool.close()

    def parts(self, whole: bool = False) -> Iterator[Inspected]:
        """All parts with their headers; with `whole`, every record is read and its sum checked. In order of names.

        A part that goes away meanwhile (evicted, say) is left out.

        Raises:
            TierError: the tier cannot be listed.
        """
        for scanned in sorted(self._tier.scan(), key=lambda scanned: scanned.part):
            try:
                header = self._header(scanned)
                if whole:
                    self._verify(scanned, header)
                yield Inspected(scanned, header)
            except PartMissing:
                continue
            except (BadHeader, PartCutShort) as error:
                yield Inspected(scanned, None, str(error))
            except TierError as error:
                yield Inspected(scanned, None, str(error), unreadable=True)

    def _header(self, scanned: Scanned) -> PartHeader:
        if scanned.nbytes < HEADER_BYTES:
            raise BadHeader(f"part {scanned.part.name} has {scanned.nbytes} bytes, less than a header")
        page = self._buffer.view[:HEADER_BYTES]
        self._tier.read(scanned.part, 0, page)
        header = decode(page)
        if header.part != scanned.part:
            raise BadHeader(f"part {scanned.part.name} holds {header.part.name}")
        if header.part_bytes != scanned.nbytes:
            raise BadHeader(f"part {scanned.part.name} has {scanned.nbytes} bytes, should have {header.part_bytes}")
        return header

    def _verify(self, scanned: Scanned, header: PartHeader) -> None:
        size, layers = header.record_bytes, scanned.part.range.layers
        if size > len(self._buffer.view):  # larger than any record met so far
            self._buffer.release()
            self._pool.close()
            self._pool = BufferPool(2 * aligned(size))
            self._buffer = self._pool.acquire(aligned(size))
        view = self._buffer.view
        at_once = len(view) // size
        for first in range(layers.start, layers.stop, at_once):
            last = min(first + at_once, layers.stop)
            self._tier.read(scanned.part, header.offset_of(first), view[: (last - first) * size])
            for layer in range(first, last):
                if record_sum(view[(layer - first) * size :][:size]) != header.sum_of(layer):
                    raise BadHeader(f"layer {layer} of part {scanned.part.name} does not match its checksum")


@dataclass
class Verified:
    """What a verification found.

    Attributes:
        parts: parts read, wrong ones included.
        nbytes: bytes of them.
        wrong: what is wrong with which, one text each.
        unreadable: what could not be read, one text each.
        removed: wrong parts that were deleted.
        seconds: time it took.
    """

    parts: int
    nbytes: int
    wrong: list[str]
    unreadable: list[str]
    removed: int
    seconds: float


def verify(tier: Tier, catalog: Catalog, repair: bool = False) -> Verified:
    """Read everything in a tier and check headers and sums.

    Args:
        tier: the tier.
        catalog: its catalog.
        repair: delete wrong parts (never those that could not be read).

    Raises:
        TierError: the tier cannot be listed.
    """
    found = Verified(0, 0, [], [], 0, 0.0)
    begun = time.perf_counter()
    with Inspector(tier) as inspector:
        for part in inspector.parts(whole=True):
            found.parts += 1
            found.nbytes += part.scanned.nbytes
            if part.unreadable:
                found.unreadable.append(part.problem)
            elif part.problem:
                found.wrong.append(part.problem)
                if repair:
                    catalog.drop(part.scanned.part)
                    found.removed += 1
    found.seconds = time.perf_counter() - begun
    return found


def collect(tier: Tier, catalog: Catalog, time_to_live: float, now: float) -> tuple[int, int]:
    """Delete parts that were not used for `time_to_live` seconds (0: none); unfinished ones of dead writers go too.

    Args:
        tier: the tier.
        catalog: its catalog.
        time_to_live: seconds.
        now: seconds since the epoch.

    Returns:
        Parts deleted, and their bytes.

    Raises:
        TierError: the tier cannot be listed.
    """
    old = [scanned for scanned in tier.scan() if time_to_live and now - scanned.used_at > time_to_live]
    for scanned in old:
        catalog.drop(scanned.part)
    return len(old), sum(scanned.nbytes for scanned in old)


def purge(tier: Tier, catalog: Catalog, salt: str | None) -> tuple[int, int]:
    """Delete all parts that were saved under a salt, or, with None, all parts.

    Parts whose header cannot be read may be of that salt: they go too.

    Returns:
        Parts deleted, and their bytes.

    Raises:
        TierError: the tier cannot be listed.
    """
    if salt is None:
        doomed = list(tier.scan())
    else:
        tag = salt_tag(salt)
        with Inspector(tier) as inspector:
            doomed = [part.scanned for part in inspector.parts() if part.header is None or part.header.salt_tag == tag]
    for scanned in doomed:
        catalog.drop(scanned.part)
    return len(doomed), sum(scanned.nbytes for scanned in doomed)
