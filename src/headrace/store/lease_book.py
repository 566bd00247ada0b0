"""The leases that one store holds: from the engine that computes a chunk to the thread that has written it.

A chunk under lease is first *computed*: its holder may give that up. From the moment its save begins it is *saved*, and
the lease ends when the save does, in the thread that wrote it, so that nobody finds the chunk neither leased nor
stored. Leases on chunks that were stored keep nobody waiting (who finds a chunk asks no further); they are given back
together, one call for many. One on a chunk that was not stored is given back at once.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

from headrace.store.catalog.catalog import Catalog

#: Leases on stored chunks that are given back in one call, while others are still held.
TOGETHER = 64


class LeaseBook:
    """Leases of one store in one catalog. May be used from any thread.

    Args:
        catalog: that of a tier which others use too.
        holder: the store's name.
        seconds: how long a lease lasts unless it is renewed.
        clock: seconds that never run backwards.
    """

    def __init__(self, catalog: Catalog, holder: str, seconds: float, clock: Callable[[], float]) -> None:
        self._catalog, self._holder, self._seconds = catalog, holder, seconds
        self._clock = clock
        self._renew_at = 0.0
        self._lock = threading.Lock()
        self._computed: dict[bytes, int] = {}  # in the order they were leased, and by how many calls
        self._saved: dict[bytes, None] = {}
        self._stored: set[bytes] = set()  # to be given back
        self.calls = 0
        """Calls of the catalog."""

    @property
    def held(self) -> int:
        """Leases on chunks that are computed or saved."""
        return len(self._computed) + len(self._saved)

    def take(self, keys: Sequence[bytes]) -> int:
        """Lease chunks, in order, up to the first that somebody else computes.

        Returns:
            How many are this store's now; those that it had already are among them. Each call wants a `give_up`, unless
            the chunks are saved.
        """
        count = self._ask(keys)
        with self._lock:
            if not self.held:
                self._renew_at = self._clock() + self._seconds / 2
            for key in keys[:count]:
                self._stored.discard(key)
                if key not in self._saved:
                    self._computed[key] = self._computed.get(key, 0) + 1
        return count

    def leased(self, keys: Sequence[bytes]) -> list[bool]:
        """For each chunk: does somebody else compute it now?"""
        self.calls += 1
        return self._catalog.leased(keys, self._holder)

    def renew(self) -> None:
        """Once leases are about half as old as they may get, let all last as long as new ones.

        Those that somebody else has by now are forgotten.
        """
        now = self._clock()
        with self._lock:
            if now < self._renew_at:
                return
            self._renew_at = now + self._seconds / 2
            held = [*self._saved, *self._computed]
        while held:
            count = self._ask(held)
            if count < len(held):
                with self._lock:
                    self._computed.pop(held[count], None)
                    self._saved.pop(held[count], None)
            held = held[count + 1 :]

    def give_up(self, keys: Iterable[bytes]) -> None:
        """These chunks are computed no more; those whose save has begun stay leased until it is over."""
        mine = []
        with self._lock:
            for key in keys:
                left = self._computed.get(key, 0) - 1
                if left > 0:
                    self._computed[key] = left
                elif left == 0:
                    del self._computed[key]
                    mine.append(key)
            mine += self._due()
        self._release(mine)

    def saving(self, key: bytes) -> None:
        """A chunk is about to be saved."""
        with self._lock:
            if key in self._computed:
                del self._computed[key]
                self._saved[key] = None

    def over(self, key: bytes, stored: bool) -> None:
        """A chunk's save is over, or there was none; `stored`: it can be found."""
        with self._lock:
            if key in self._saved:
                del self._saved[key]
            elif key in self._computed:
                del self._computed[key]
            else:
                return
            mine = [] if stored else [key]
            if stored:
                self._stored.add(key)
            mine += self._due()
        self._release(mine)

    def close(self) -> None:
        """Give all back."""
        with self._lock:
            mine = [*self._computed, *self._saved, *self._stored]
            self._computed.clear()
            self._saved.clear()
            self._stored.clear()
        self._release(mine)

    def _due(self) -> list[bytes]:
        """Under the lock: leases on stored chunks, if it is time to give them back."""
        if len(self._stored) < TOGETHER and (self._computed or self._saved):
            return []
        due = list(self._stored)
        self._stored.clear()
        return due

    def _ask(self, keys: Sequence[bytes]) -> int:
        self.calls += 1
        return self._catalog.lease(keys, self._holder, self._seconds)

    def _release(self, keys: Sequence[bytes]) -> None:
        if keys:
            self.calls += 1
            self._catalog.release(keys, self._holder)
