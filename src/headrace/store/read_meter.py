"""How fast a tier is read: what replication has to know."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from headrace.store.native.library import Job
from headrace.store.part import PartId
from headrace.store.tiers.tier import PartWriter, Scanned, Scope, SettlingTier, Tier

#: Assumed before anything was read, bytes per second.
PRIOR_RATE = 1e9
#: Seconds of reading after which what came before counts half.
MEMORY_SECONDS = 5.0

T = TypeVar("T")


class MeteredTier:
    """A tier, and the bytes per second it is read with while it is read at all, by however many at once."""

    def __init__(self, tier: Tier) -> None:
        self.name, self.capacity, self.depth = tier.name, tier.capacity, tier.depth
        self.scope: Scope = tier.scope
        self._tier = tier
        self._settling = tier if isinstance(tier, SettlingTier) else None
        self._lock = threading.Lock()
        self._inflight = 0
        self._since = 0.0
        self._busy = 0.0
        self._bytes = 0.0
        self._total = 0.0

    @property
    def busy_seconds(self) -> float:
        """Time with at least one read in flight; one that goes on is counted when it ends."""
        with self._lock:
            return self._total

    @property
    def rate(self) -> float:
        """Bytes per second."""
        with self._lock:
            return self._bytes / self._busy if self._bytes and self._busy else PRIOR_RATE

    def read(self, part: PartId, offset: int, into: memoryview) -> None:
        """See `Tier.read`."""
        self._read(lambda: self._tier.read(part, offset, into), len(into))

    def read_and_settle(self, part: PartId, offset: int, into: memoryview, job: Job) -> int:
        """See `SettlingTier.read_and_settle`, which the tier behind need not be."""
        tier = self._settling
        if tier is not None:
            return self._read(lambda: tier.read_and_settle(part, offset, into, job), len(into))
        self.read(part, offset, into)
        return job.settle()

    def _read(self, read: Callable[[], T], nbytes: int) -> T:
        with self._lock:
            self._inflight += 1
            if self._inflight == 1:
                self._since = time.perf_counter()
        done = 0
        try:
            result = read()
            done = nbytes
            return result
        finally:
            with self._lock:
                now = time.perf_counter()
                self._busy += now - self._since
                self._total += now - self._since
                self._since = now
                self._bytes += done
                self._inflight -= 1
                if self._busy > MEMORY_SECONDS:
                    self._busy, self._bytes = self._busy / 2, self._bytes / 2

    def create(self, part: PartId, nbytes: int) -> PartWriter:
        """See `Tier.create`."""
        return self._tier.create(part, nbytes)

    def delete(self, part: PartId) -> None:
        """See `Tier.delete`."""
        self._tier.delete(part)

    def scan(self) -> Iterator[Scanned]:
        """See `Tier.scan`."""
        return self._tier.scan()

    def close(self) -> None:
        """See `Tier.close`."""
        self._tier.close()
