"""The catalog of a tier, in the process that owns the tier."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from headrace.store.catalog.catalog import TierUsage
from headrace.store.catalog.leases import Leases
from headrace.store.catalog.ledger import Ledger, Reservation
from headrace.store.part import PartId, PartRange
from headrace.store.tiers.tier import Tier, TierError

_log = logging.getLogger(__name__)

#: Seconds between tries when a tier refuses to list or delete.
RETRY_SECONDS = 1.0
#: Seconds between two looks for parts past their time to live.
EXPIRY_SECONDS = 60.0
#: Longest lease, seconds.
MAX_LEASE_SECONDS = 3600.0
#: Files deleted in a row before others may make room.
_SWEEP_BATCH = 16


class LocalCatalog:
    """Index, capacity, eviction and leases of one tier; see `Catalog` for the calls that all catalogs share.

    A reservation counts from the moment it is made; the bytes of a part going away count until its file is deleted.
    So the tier never holds more than its capacity, except for what a scan finds in excess and cannot delete yet. No
    file is deleted under the lock that `find` takes; whoever makes room deletes what is in the way before it has it.

    Args:
        tier: where the parts lie; scanned here.
        time_to_live: seconds that a part stays unused before it goes; 0 keeps parts for good. After a restart a part
            is as old as the tier says.
        clock: seconds that never run backwards.
        wall: seconds since the epoch.
        quiet_until: on this clock; until then only `adopt` gets room. For the heir of a dead owner: others are still
            writing parts that nobody has told it about.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        time_to_live: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        quiet_until: float = float("-inf"),
    ) -> None:
        self.tier = tier
        self._time_to_live = time_to_live
        self._clock = clock
        self._wall = wall
        self._quiet_until = quiet_until
        self._ledger = Ledger()
        self._leases = Leases()
        self._lock = threading.Lock()  # the books; held for microseconds
        self._deleting = threading.Lock()  # one thread deletes files at a time; taken before `_lock`
        self._evicted = 0
        self._dropped = 0
        self._listed = False  # False: the tier could not be scanned, so nobody knows how full it is
        self._gone: set[PartId] | None = None  # parts deleted while a scan runs
        self._retry_at = float("-inf")
        self._expire_at = float("-inf")
        self._rescan()
        self.sweep()

    def find(self, keys: Sequence[bytes]) -> list[tuple[PartRange, ...]]:
        """See `Catalog.find`."""
        now = self._clock()
        with self._lock:
            chain = self._ledger.chain(keys, now - self._time_to_live if self._time_to_live else float("-inf"))
            self._ledger.touch(chain, keys, now)
            return [chunk.ranges for chunk in chain]

    def reserve(self, part: PartId, nbytes: int, weight: float, holder: str = "") -> bool:
        """See `Catalog.reserve`; `holder` is who writes: the empty text is this process."""
        if self._clock() < self._quiet_until:
            return False
        return self.adopt(part, nbytes, weight, holder)

    def adopt(self, part: PartId, nbytes: int, weight: float, holder: str = "") -> bool:
        """`reserve` for a part that another owner had granted: it is being written already."""
        reservation = Reservation(nbytes, max(0.0, weight), holder)
        with self._lock:
            granted = self._grant(part, reservation)
        if granted is not None:
            return granted
        with self._deleting:
            while True:
                with self._lock:
                    granted = self._grant(part, reservation)
                    if granted is not None:
                        return granted
                    if self._clock() < self._retry_at or not self._make_room(nbytes):
                        return False
                    doomed = self._doomed(part)
                if not self._delete(doomed):
                    return False

    def publish(self, part: PartId, holder: str = "") -> None:
        """See `Catalog.publish`. A part that nobody has room for is deleted by the next sweep."""
        with self._lock:
            reservation = self._ledger.reserved.get(part)
            if reservation is not None:
                if reservation.holder == holder:
                    self._ledger.seal(part, self._clock())
            elif not self._known(part):
                self._ledger.condemn_unknown(part)

    def withdraw(self, part: PartId, holder: str = "") -> None:
        """See `Catalog.withdraw`."""
        with self._lock:
            reservation = self._ledger.reserved.get(part)
            if reservation is not None and reservation.holder == holder:
                self._ledger.free(part)

    def drop(self, part: PartId) -> None:
        """See `Catalog.drop`. A part that somebody is writing anew is left alone."""
        with self._lock:
            if self._ledger.sealed(part):
                self._dropped += 1
                self._ledger.condemn(part)
            elif not self._known(part):
                self._ledger.condemn_unknown(part)
            else:
                return
        with self._deleting:
            self._delete([part])

    def lease(self, keys: Sequence[bytes], holder: str, seconds: float) -> int:
        """See `Catalog.lease`."""
        now = self._clock()
        with self._lock:
            return self._leases.take(keys, holder, now + min(seconds, MAX_LEASE_SECONDS), now)

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        """See `Catalog.release`."""
        with self._lock:
            self._leases.release(keys, holder)

    def leased(self, keys: Sequence[bytes], holder: str) -> list[bool]:
        """See `Catalog.leased`."""
        now = self._clock()
        with self._lock:
            return [self._leases.holder(key, now) not in (None, holder) for key in keys]

    def holds_leases(self, holder: str) -> bool:
        """True when the holder has leases."""
        with self._lock:
            return self._leases.holds(holder)

    def abandon(self, holder: str, lease_holders: Sequence[str] = ()) -> None:
        """A writing process is gone: its leases end, and its room is free after the next sweep."""
        with self._lock:
            for lease_holder in lease_holders:
                self._leases.release_all(lease_holder)
            self._ledger.abandon(holder)

    def usage(self) -> TierUsage:
        """See `Catalog.usage`."""
        with self._lock:
            ledger = self._ledger
            return TierUsage(
                capacity=self.tier.capacity,
                used=ledger.used,
                parts=ledger.parts,
                evicted=self._evicted,
                dropped=self._dropped,
            )

    def sweep(self) -> None:
        """What is left to do: delete condemned and expired parts, clear up behind dead writers. May wait for I/O."""
        now = self._clock()
        with self._lock:
            abandoned = dict(self._ledger.abandoned)
            self._leases.expire(now)
            if self._time_to_live and now >= self._expire_at:
                self._expire_at = now + min(EXPIRY_SECONDS, self._time_to_live / 2)
                self._expire(now)
            retry = now >= self._retry_at
        if not retry:
            return
        if abandoned or not self._listed:
            self._rescan(abandoned)
        while True:
            with self._deleting:
                with self._lock:
                    doomed = self._doomed()
                if not doomed or not self._delete(doomed):
                    return

    def close(self) -> None:
        """See `Catalog.close`: nothing to let go of."""

    def check(self) -> None:
        """For tests: count again.

        Raises:
            RuntimeError: the books are wrong, or more is held than the tier may hold.
        """
        with self._lock:
            self._ledger.check()
            if self._ledger.used > self.tier.capacity and not self._ledger.condemned:
                raise RuntimeError(f"{self._ledger.used} bytes used of {self.tier.capacity}")

    def _known(self, part: PartId) -> bool:
        ledger = self._ledger
        return ledger.sealed(part) or part in ledger.reserved or part in ledger.abandoned or part in ledger.condemned

    def _grant(self, part: PartId, reservation: Reservation) -> bool | None:
        """Under the lock: yes, no, or None when room has to be made first."""
        ledger = self._ledger
        if not self._listed or reservation.nbytes > self.tier.capacity:
            return False
        if part in ledger.abandoned:  # the writer is back before anybody cleared up behind it
            ledger.settle(part)
        if ledger.sealed(part) or part in ledger.reserved:
            return False
        if part in ledger.condemned or ledger.used + reservation.nbytes > self.tier.capacity:
            return None
        ledger.reserve(part, reservation)
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Under the lock: condemn parts until `nbytes` will fit; nothing is condemned when they never would."""
        ledger = self._ledger
        if ledger.shortage(nbytes, self.tier.capacity) > 0 and ledger.written + nbytes > self.tier.capacity:
            return False
        while ledger.shortage(nbytes, self.tier.capacity) > 0:
            if ledger.condemn_first() is None:
                return False
            self._evicted += 1
        return True

    def _doomed(self, first: PartId | None = None) -> list[PartId]:
        """Under the lock: some condemned parts, `first` before others if it is one."""
        condemned = self._ledger.condemned
        doomed = list(itertools.islice(condemned, _SWEEP_BATCH))
        return [first, *doomed] if first in condemned else doomed

    def _delete(self, doomed: Sequence[PartId]) -> bool:
        """Holding `_deleting` only: delete files of condemned parts; False when one would not go."""
        for part in doomed:
            if part not in self._ledger.condemned:  # somebody else has deleted it, and it may be written anew
                continue
            try:
                self.tier.delete(part)
            except TierError as error:
                _log.warning("%s: %s; its bytes stay counted, next try in %g s", self.tier.name, error, RETRY_SECONDS)
                with self._lock:
                    self._retry_at = self._clock() + RETRY_SECONDS
                return False
            with self._lock:
                self._ledger.deleted(part)
                if self._gone is not None:
                    self._gone.add(part)
        return True

    def _expire(self, now: float) -> None:
        """Under the lock: condemn what nobody has used for too long."""
        for chunk in [c for c in self._ledger.chunks.values() if c.used_at < now - self._time_to_live]:
            for range_ in chunk.ranges:
                self._ledger.condemn(PartId(chunk.key, range_))

    def _rescan(self, abandoned: dict[PartId, Reservation] | None = None) -> None:
        """Count what lies in the tier and is not known; then settle what dead writers had reserved."""
        with self._lock:
            self._gone = set()
        try:
            found = sorted(self.tier.scan(), key=lambda scanned: scanned.used_at)
        except TierError as error:
            _log.warning("%s cannot be listed, so nothing is stored in it for now: %s", self.tier.name, error)
            with self._lock:
                self._gone = None
                self._retry_at = self._clock() + RETRY_SECONDS
            return
        now, wall = self._clock(), self._wall()
        with self._lock:
            ledger = self._ledger
            for part, reservation in (abandoned or {}).items():
                if ledger.abandoned.get(part) is reservation:
                    ledger.settle(part)
            for scanned in found:
                if not self._known(scanned.part) and scanned.part not in self._gone:
                    ledger.found(scanned.part, scanned.nbytes, now - max(0.0, wall - scanned.used_at))
            self._gone = None
            self._listed = True
            if self._time_to_live:
                self._expire(now)
            self._make_room(0)
