"""What a tier's bytes are taken by: sealed parts by chunk, parts being written, parts about to be deleted.

Plain data without locks or I/O; `LocalCatalog` guards it. Invariant: `used` is the sum over all of them, byte by byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.store.catalog.eviction import EvictionOrder, Item
from headrace.store.part import PartId, PartRange

#: Chunks remembered to follow another before they are stored.
MAX_HINTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for a part being written.

    Attributes:
        nbytes: its size.
        weight: seconds to compute it again.
        holder: who writes it.
    """

    nbytes: int
    weight: float
    holder: str


class Chunk(Item):
    """A chunk with sealed parts.

    Attributes:
        parts: bytes and weight (None: unknown) of each.
        ranges: their ranges, made once.
    """

    __slots__ = ("parts", "ranges")

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self.parts: dict[PartRange, tuple[int, float | None]] = {}
        self.ranges: tuple[PartRange, ...] = ()


class Ledger:
    """The books of one tier.

    Attributes:
        used: bytes of everything below.
        chunks: sealed parts by chunk key.
        reserved: being written.
        abandoned: reserved by a process that is gone; something of them may still lie in the tier.
        condemned: no longer to be found, their files not deleted yet.
    """

    def __init__(self) -> None:
        self.used = 0
        self.chunks: dict[bytes, Chunk] = {}
        self.reserved: dict[PartId, Reservation] = {}
        self.abandoned: dict[PartId, Reservation] = {}
        self.condemned: dict[PartId, int] = {}
        self._order = EvictionOrder()
        self._before: dict[bytes, bytes] = {}
        self._parts = 0
        self._written = 0
        self._condemned_bytes = 0

    @property
    def parts(self) -> int:
        """How many parts can be found."""
        return self._parts

    @property
    def written(self) -> int:
        """Bytes of parts being written: no eviction can free them."""
        return self._written

    def sealed(self, part: PartId) -> bool:
        """True when the part can be found."""
        chunk = self.chunks.get(part.key)
        return chunk is not None and part.range in chunk.parts

    def reserve(self, part: PartId, reservation: Reservation) -> None:
        """Count a part about to be written; it is in no other list."""
        self.reserved[part] = reservation
        self.used += reservation.nbytes
        self._written += reservation.nbytes

    def free(self, part: PartId) -> None:
        """A reserved part will not be written."""
        nbytes = self.reserved.pop(part).nbytes
        self.used -= nbytes
        self._written -= nbytes

    def abandon(self, holder: str) -> None:
        """The writer of these parts is gone."""
        for part in [part for part, reservation in self.reserved.items() if reservation.holder == holder]:
            self.abandoned[part] = self.reserved.pop(part)

    def settle(self, part: PartId) -> None:
        """Nothing of an abandoned part lies in the tier uncounted any more."""
        nbytes = self.abandoned.pop(part).nbytes
        self.used -= nbytes
        self._written -= nbytes

    def seal(self, part: PartId, now: float) -> None:
        """A reserved part is complete."""
        reservation = self.reserved.pop(part)
        self._written -= reservation.nbytes
        self._add(part, reservation.nbytes, reservation.weight, now)

    def found(self, part: PartId, nbytes: int, used_at: float) -> None:
        """Count a sealed part that was in no list."""
        self.used += nbytes
        self._add(part, nbytes, None, used_at)

    def chain(self, keys: Sequence[bytes], used_since: float) -> list[Chunk]:
        """The chunks of the first keys, up to one that is not there or was last used before `used_since`."""
        chain = []
        for key in keys:
            chunk = self.chunks.get(key)
            if chunk is None or chunk.used_at < used_since:
                break
            chain.append(chunk)
        return chain

    def touch(self, chain: Sequence[Chunk], keys: Sequence[bytes], now: float) -> None:
        """The first chunks of `keys` were used; the others will follow them when they are stored."""
        self._order.touch(chain, now)
        for i in range(max(1, len(chain)), len(keys)):
            self._before.pop(keys[i], None)
            self._before[keys[i]] = keys[i - 1]
        while len(self._before) > MAX_HINTS:
            del self._before[next(iter(self._before))]

    def condemn(self, part: PartId) -> None:
        """A sealed part is not to be found any more; its bytes count until `deleted`."""
        chunk = self.chunks[part.key]
        nbytes, _ = chunk.parts.pop(part.range)
        self.condemned[part] = nbytes
        self._condemned_bytes += nbytes
        self._parts -= 1
        if chunk.parts:
            self._resize(chunk)
        else:
            self._order.remove(chunk)
            del self.chunks[part.key]

    def condemn_unknown(self, part: PartId) -> None:
        """A part that is in no list may have a file; nothing was counted for it."""
        self.condemned[part] = 0

    def condemn_first(self) -> PartId | None:
        """Condemn the part that has to go first; None when there is none."""
        chunk = self._order.first()
        if chunk is None:
            return None
        self._order.evicted(chunk)
        part = PartId(chunk.key, self.chunks[chunk.key].ranges[-1])
        self.condemn(part)
        return part

    def deleted(self, part: PartId) -> None:
        """A condemned part's file is gone."""
        nbytes = self.condemned.pop(part, 0)
        self.used -= nbytes
        self._condemned_bytes -= nbytes

    def shortage(self, nbytes: int, capacity: int) -> int:
        """Bytes still to be condemned before `nbytes` more would fit, once all condemned are deleted."""
        return self.used - self._condemned_bytes + nbytes - capacity

    def check(self) -> None:
        """Count everything again.

        Raises:
            RuntimeError: the books are wrong.
        """
        sealed = sum(nbytes for chunk in self.chunks.values() for nbytes, _ in chunk.parts.values())
        written = sum(r.nbytes for r in self.reserved.values()) + sum(r.nbytes for r in self.abandoned.values())
        condemned = sum(self.condemned.values())
        if self.used != sealed + written + condemned or (written, condemned) != (self._written, self._condemned_bytes):
            raise RuntimeError(
                f"{self.used} bytes counted, {sealed} sealed + {written} written + {condemned} condemned"
            )
        parts = [PartId(chunk.key, range_) for chunk in self.chunks.values() for range_ in chunk.parts]
        for part in parts:
            if part in self.reserved or part in self.abandoned or part in self.condemned:
                raise RuntimeError(f"part {part.name} is in two lists")
        if len(parts) != self._parts or len(self._order) != len(self.chunks):
            raise RuntimeError(f"{self._parts} parts counted, {len(parts)} there; {len(self._order)} chunks in order")
        for chunk in self.chunks.values():
            if chunk.ranges != tuple(chunk.parts) or chunk.nbytes != sum(n for n, _ in chunk.parts.values()):
                raise RuntimeError(f"chunk {chunk.key.hex()} does not add up")

    def _add(self, part: PartId, nbytes: int, weight: float | None, now: float) -> None:
        self._parts += 1
        chunk = self.chunks.get(part.key)
        if chunk is not None:
            chunk.parts[part.range] = (nbytes, weight)
            self._resize(chunk)
            return
        chunk = self.chunks[part.key] = Chunk(part.key)
        chunk.parts[part.range] = (nbytes, weight)
        chunk.ranges = (part.range,)
        chunk.nbytes, chunk.weight = nbytes, weight
        before = self._before.pop(part.key, None)
        self._order.add(chunk, now, self.chunks.get(before) if before is not None else None)

    def _resize(self, chunk: Chunk) -> None:
        chunk.ranges = tuple(chunk.parts)
        weights = [weight for _, weight in chunk.parts.values() if weight is not None]
        nbytes = sum(nbytes for nbytes, _ in chunk.parts.values())
        self._order.resize(chunk, nbytes, sum(weights) if weights else None)
