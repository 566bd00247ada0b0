"""The catalog that the rest of the store holds: owner or client of the tier, whichever it can be right now.

Whoever gets the tier's lock owns the tier and answers the others; who does not asks the owner. When the owner is gone
or silent, calls answer "nothing known" at once, and a thread of each process tries again: the lock first, then the
owner. A new owner scans the tier; what the others are writing they tell it themselves, and for a moment it grants
nothing else. No call raises.
"""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.store.catalog.catalog import Catalog, TierUsage
from headrace.store.catalog.local import LocalCatalog
from headrace.store.catalog.messages import Written
from headrace.store.catalog.office import Election, Owner
from headrace.store.catalog.ownership import place_of
from headrace.store.catalog.remote import RemoteCatalog, Unanswered
from headrace.store.part import PartId, PartRange
from headrace.store.tiers.tier import Tier

_log = logging.getLogger(__name__)

#: Seconds that a call to the owner may take.
CALL_SECONDS = 0.25
#: Seconds that the heir of a dead owner grants room only to what is being written already.
GRACE_SECONDS = 0.5
#: Seconds that opening waits for an owner to be ready.
OPEN_SECONDS = 2.0
#: Seconds between two rounds of an owner's chores.
_ROUND_SECONDS = 1.0
_FIRST_PAUSE, _LAST_PAUSE = 0.005, 0.5

T = TypeVar("T")


def open_catalog(
    tier: Tier,
    lock_dir: Path | None = None,
    *,
    time_to_live: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    call_timeout: float = CALL_SECONDS,
    grace: float = GRACE_SECONDS,
) -> "ElectedCatalog":
    """The catalog of a tier, shared with all processes of this node that open the same one.

    Args:
        tier: the tier. Without a `folder` it belongs to this process alone.
        lock_dir: folder for lock and socket instead of the tier's own.
        time_to_live: see `LocalCatalog`.
        clock: see `LocalCatalog`.
        call_timeout: seconds that a call to another process may take.
        grace: see `GRACE_SECONDS`.
    """

    def make_local(quiet: bool) -> LocalCatalog:
        quiet_until = clock() + grace if quiet else float("-inf")
        return LocalCatalog(tier, time_to_live=time_to_live, clock=clock, quiet_until=quiet_until)

    def make_election(client_lost: Callable[[], None]) -> Election:
        return Election(tier, lambda: place_of(tier, lock_dir), make_local, call_timeout, client_lost)

    return ElectedCatalog(tier, make_election)


class ElectedCatalog(Catalog):
    """See `open_catalog`."""

    def __init__(self, tier: Tier, make_election: Callable[[Callable[[], None]], Election]) -> None:
        self._tier = tier
        self._election = make_election(self._wake)
        self._catalog: LocalCatalog | RemoteCatalog | None = None
        self._owner: Owner | None = None
        self._written: dict[PartId, Written] = {}  # room granted to this process; a new owner has to be told
        self._book = threading.Lock()
        self._last_usage = TierUsage(capacity=tier.capacity, used=0, parts=0, evicted=0, dropped=0)
        self._closed = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        deadline = time.monotonic() + OPEN_SECONDS
        pause = _FIRST_PAUSE
        while not self._elect() and time.monotonic() < deadline:
            self._wait(pause)
            pause = min(2 * pause, _LAST_PAUSE)
        self._thread = threading.Thread(target=self._keep, name=f"headrace-catalog-{tier.name}", daemon=True)
        self._thread.start()

    @property
    def owner(self) -> bool:
        """True while this process owns the tier."""
        return self._owner is not None

    @property
    def known(self) -> bool:
        """True while there is an owner who answers."""
        return self._catalog is not None

    def find(self, keys: Sequence[bytes]) -> list[tuple[PartRange, ...]]:
        """See `Catalog.find`."""
        return self._ask(lambda catalog: catalog.find(keys), [])

    def reserve(self, part: PartId, nbytes: int, weight: float) -> bool:
        """See `Catalog.reserve`."""
        with self._book:
            catalog = self._catalog
            if catalog is None or part in self._written:
                return False
            self._written[part] = Written(part, nbytes, weight, False)
        if self._ask(lambda catalog: catalog.reserve(part, nbytes, weight), False):
            return True
        with self._book:
            self._written.pop(part, None)
        if self._catalog is not catalog:  # the new owner may have been told
            self._ask(lambda catalog: catalog.withdraw(part), None)
        return False

    def publish(self, part: PartId) -> None:
        """See `Catalog.publish`."""
        with self._book:
            written = self._written.get(part)
            if written is None:
                return
            self._written[part] = msgspec.structs.replace(written, sealed=True)
        if self._tell(lambda catalog: catalog.publish(part)):
            with self._book:
                self._written.pop(part, None)

    def withdraw(self, part: PartId) -> None:
        """See `Catalog.withdraw`."""
        with self._book:
            if self._written.pop(part, None) is None:
                return
        self._tell(lambda catalog: catalog.withdraw(part))

    def drop(self, part: PartId) -> None:
        """See `Catalog.drop`. Forgotten while there is no owner: whoever reads the part next drops it again."""
        self._tell(lambda catalog: catalog.drop(part))

    def lease(self, keys: Sequence[bytes], holder: str, seconds: float) -> int:
        """See `Catalog.lease`. Without an owner everybody may compute everything."""
        return self._ask(lambda catalog: catalog.lease(keys, holder, seconds), len(keys))

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        """See `Catalog.release`."""
        self._tell(lambda catalog: catalog.release(keys, holder))

    def leased(self, keys: Sequence[bytes], holder: str) -> list[bool]:
        """See `Catalog.leased`."""
        return self._ask(lambda catalog: catalog.leased(keys, holder), [False] * len(keys))

    def usage(self) -> TierUsage:
        """See `Catalog.usage`; the last that was known while there is no owner."""
        self._last_usage = self._ask(lambda catalog: catalog.usage(), self._last_usage)
        return self._last_usage

    def close(self) -> None:
        """See `Catalog.close`."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake()
        self._thread.join()
        catalog, self._catalog = self._catalog, None
        if isinstance(catalog, RemoteCatalog):
            catalog.close()
        self._resign()
        self._wake_in.close()
        self._wake_out.close()

    def check(self) -> None:
        """For tests: the owner counts again.

        Raises:
            RuntimeError: the books are wrong.
        """
        if isinstance(self._catalog, LocalCatalog):
            self._catalog.check()

    def _ask(self, ask: Callable[[LocalCatalog | RemoteCatalog], T], unknown: T) -> T:
        catalog = self._catalog
        if catalog is None:
            return unknown
        try:
            return ask(catalog)
        except Unanswered:
            if isinstance(catalog, RemoteCatalog) and catalog.broken:
                self._lose(catalog)
            return unknown

    def _tell(self, tell: Callable[[LocalCatalog | RemoteCatalog], None]) -> bool:
        """True when the owner knows."""

        def ask(catalog: LocalCatalog | RemoteCatalog) -> bool:
            tell(catalog)
            return True

        return self._ask(ask, False)

    def _lose(self, catalog: RemoteCatalog) -> None:
        with self._book:
            if self._catalog is not catalog:
                return
            self._catalog = None
        self._wake()

    def _keep(self) -> None:
        """The thread that sees to it that there is an owner, and does the owner's chores."""
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            catalog = self._catalog
            if catalog is None:
                if self._elect():
                    pause = _FIRST_PAUSE
                else:
                    self._wait(pause)
                    pause = min(2 * pause, _LAST_PAUSE)
            elif isinstance(catalog, LocalCatalog):
                self._wait(_ROUND_SECONDS)
                catalog.sweep()
                if self._owner is not None and self._owner.deposed:
                    _log.warning("%s: the lock file is gone; looking for the owner again", self._tier.name)
                    self._catalog = None
                    self._resign()
            else:
                self._await_end(catalog)

    def _await_end(self, catalog: RemoteCatalog) -> None:
        """Return when closed; or when the connection is of no use any more, after closing it."""
        hung_up = self._wait(None, catalog.fileno())
        if not (hung_up or catalog.broken or self._catalog is not catalog):
            return
        self._lose(catalog)
        catalog.close()

    def _elect(self) -> bool:
        outcome = self._election.hold(self._being_written)
        if outcome is None:
            return False
        held, told = outcome
        if isinstance(held, Owner):
            self._owner, self._catalog = held, held.catalog
        else:
            self._catalog = held
        self._tell_rest(told)
        return True

    def _being_written(self) -> list[Written]:
        with self._book:
            return list(self._written.values())

    def _tell_rest(self, told: Sequence[Written]) -> None:
        """What has become of these parts while the new owner was being told of them."""
        for written in told:
            with self._book:
                now = self._written.get(written.part)
            if now is None:
                self._tell(lambda catalog, part=written.part: catalog.withdraw(part))  # type: ignore[misc]
            elif now.sealed and (
                written.sealed or self._tell(lambda catalog, part=now.part: catalog.publish(part))  # type: ignore[misc]
            ):
                with self._book:
                    self._written.pop(written.part, None)

    def _resign(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.resign(writing=bool(self._written))

    def _wake(self) -> None:
        with suppress(OSError):  # full of wake-ups already, or closed
            self._wake_out.send(b"x")

    def _wait(self, seconds: float | None, connection: int = -1) -> bool:
        """Until woken, or `seconds` have passed; True when the other end of `connection` is gone."""
        poll = select.poll()
        poll.register(self._wake_in, select.POLLIN)
        if connection >= 0:
            poll.register(connection, 0)
        ready = dict(poll.poll(None if seconds is None else seconds * 1000))
        if self._wake_in.fileno() in ready:
            self._wake_in.recv(4096)
        return connection in ready
