"""The catalog of one tier, as every process sees it.

One process owns a tier (it holds the tier's lock file) and answers the others over a unix socket; `LocalCatalog` is
the owner's, `RemoteCatalog` everybody else's, `election` decides and takes over when the owner dies.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.store.part import PartId, PartRange


class TierUsage(msgspec.Struct, frozen=True, kw_only=True):
    """How full a tier is.

    Attributes:
        capacity: bytes it may hold.
        used: bytes of its parts, those being written included.
        parts: parts it holds.
        evicted: parts that went to make room, since the owner started.
        dropped: parts that were proven wrong, since the owner started.
    """

    capacity: int
    used: int
    parts: int
    evicted: int
    dropped: int


class Catalog(Protocol):
    """Which parts a tier holds. Calls are quick, never wait for I/O on parts, and may come from several threads."""

    def find(self, keys: Sequence[bytes]) -> list[tuple[PartRange, ...]]:
        """The sealed parts of each chunk, in the order of `keys`; ends before the first chunk of which there is none.

        Finding a chunk counts as a use of it.
        """
        ...

    def reserve(self, part: PartId, nbytes: int, weight: float) -> bool:
        """Make room for a part about to be written, evicting others if need be (their files are deleted first).

        Args:
            part: what is to be written.
            nbytes: its size.
            weight: what it costs to compute it again, seconds; of equally old parts the cheapest goes first.

        Returns:
            False when the tier has the part already, somebody is writing it, or there is no room to be made.
        """
        ...

    def publish(self, part: PartId) -> None:
        """A reserved part is sealed; it can be found from now on."""
        ...

    def withdraw(self, part: PartId) -> None:
        """A reserved part was not written; its bytes are free again."""
        ...

    def drop(self, part: PartId) -> None:
        """A part is missing or wrong: forget it and delete its file."""
        ...

    def lease(self, keys: Sequence[bytes], holder: str, seconds: float) -> int:
        """Say that `holder` computes these chunks, in order, for at most so long.

        Returns:
            How many of them, from the first, are now (or still) the holder's; the next one is somebody else's.
        """
        ...

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        """The holder's leases on these chunks end."""
        ...

    def leased(self, keys: Sequence[bytes], holder: str) -> list[bool]:
        """For each chunk: is somebody other than `holder` computing it now?"""
        ...

    def usage(self) -> TierUsage:
        """How full it is."""
        ...

    def close(self) -> None:
        """Let go: the owner gives the lock up, others disconnect."""
        ...
