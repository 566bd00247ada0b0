"""What a storage tier is.

Rules for every tier:
1. It stores whole parts under their names and knows nothing of what is in them.
2. A part is visible only when it is complete: `seal` publishes at once or not at all. Two writers of one part never
   disturb each other; the later seal replaces the earlier.
3. All calls block and may come from several threads at once; none holds the interpreter lock while it moves bytes.
4. What goes wrong is a `TierError`; a part that is not there is `PartMissing`. Nothing else escapes.
5. Buffers passed in belong to the tier until the call returns, and not a moment longer.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from headrace.core.errors import HeadraceError
from headrace.store.native.library import Job
from headrace.store.part import PartId

Scope = Literal["node", "cluster"]


class TierError(HeadraceError):
    """A tier could not do what was asked; says which tier, which part and why."""


class PartMissing(TierError):
    """The part is not there (any more): a miss."""


class PartCutShort(TierError):
    """The part ends before what was asked for: the part is wrong, not the tier."""


class TierFull(TierError):
    """No room: the tier is read-only until something is deleted."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """A part found by a scan.

    Attributes:
        part: its name.
        nbytes: what it takes.
        used_at: when it was last written or read, seconds since the epoch, as far as the tier knows.
    """

    part: PartId
    nbytes: int
    used_at: float


class PartWriter(AbstractContextManager["PartWriter"], Protocol):
    """A part being written. Leaving the context without `seal` aborts."""

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset; offset and length are multiples of `ALIGNMENT` and the memory is aligned.

        Raises:
            TierFull: no room.
            TierError: the write failed.
        """
        ...

    def seal(self) -> None:
        """Publish the part.

        Raises:
            TierError: it could not be published; it is gone.
        """
        ...

    def abort(self) -> None:
        """Forget the part; nothing of it was ever visible. Idempotent, also after `seal` (then it does nothing)."""
        ...


class Tier(Protocol):
    """Where parts lie.

    Attributes:
        name: unique among the tiers of a store, e.g. `memory` or `dir:/mnt/nvme`; a label in metrics.
        capacity: bytes it may hold.
        scope: `node`, or `cluster` when other nodes see the same parts.
        depth: reads in flight that keep it busy.
    """

    name: str
    capacity: int
    scope: Scope
    depth: int

    def read(self, part: PartId, offset: int, into: memoryview) -> None:
        """Fill `into` (aligned memory, a multiple of `ALIGNMENT` long) from an aligned offset of a sealed part.

        Raises:
            PartMissing: there is no such part.
            PartCutShort: it has fewer bytes.
            TierError: the read failed.
        """
        ...

    def create(self, part: PartId, nbytes: int) -> PartWriter:
        """Begin to write a part of known size.

        Raises:
            TierFull: no room.
            TierError: it cannot be begun.
        """
        ...

    def delete(self, part: PartId) -> None:
        """Remove a part; one that is not there is removed already.

        Raises:
            TierError: it is still there.
        """
        ...

    def scan(self) -> Iterator[Scanned]:
        """All sealed parts; removes what dead writers left behind.

        Raises:
            TierError: the tier cannot be listed.
        """
        ...

    def close(self) -> None:
        """Let go of what is open; parts stay."""
        ...


@runtime_checkable
class SettlingTier(Protocol):
    """A tier that reads and settles in one call without the interpreter lock."""

    def read_and_settle(self, part: PartId, offset: int, into: memoryview, job: Job) -> int:
        """Do what `Tier.read` does and then `job.settle`; returns what that returns.

        Raises:
            PartMissing: there is no such part.
            PartCutShort: it has fewer bytes.
            TierError: the read failed.
        """
        ...


def put_all(writer: PartWriter, pieces: Sequence[memoryview]) -> None:
    """Put pieces one behind the other and seal."""
    offset = 0
    for piece in pieces:
        writer.put(offset, piece)
        offset += len(piece)
    writer.seal()
