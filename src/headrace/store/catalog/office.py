"""Becoming the owner of a tier or a client of its owner, whichever is possible right now."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.store.catalog.local import LocalCatalog
from headrace.store.catalog.messages import Written
from headrace.store.catalog.ownership import OwnerLock, Place, listen, owner_address
from headrace.store.catalog.remote import RemoteCatalog, Unanswered
from headrace.store.catalog.server import CatalogServer
from headrace.store.tiers.tier import Tier, TierError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """This process owns the tier.

    Attributes:
        catalog: the tier's.
        lock: the tier's; None when the tier is private to this process.
        server: answers the others.
    """

    catalog: LocalCatalog
    lock: OwnerLock | None = None
    server: CatalogServer | None = None

    @property
    def deposed(self) -> bool:
        """True once the lock file was removed or replaced: somebody else may own the tier now."""
        return self.lock is not None and not self.lock.ours

    def resign(self, *, writing: bool) -> None:
        """Stop being the owner. The lock goes before the connections do: who notices their end finds it free.

        Args:
            writing: this process goes on writing parts that were granted.
        """
        if self.server is None or self.lock is None:
            return
        self.server.stop()
        if self.lock.ours:
            self.server.address.unlink(missing_ok=True)
        self.lock.release(clean=self.server.clients == 0 and not writing)
        self.server.close()


class Election:
    """How this process comes to a catalog of one tier.

    Args:
        tier: the tier.
        find_place: where owner and clients meet; may raise `OSError`; None for a private tier.
        make_local: makes the owner's catalog; true when the last owner is dead.
        call_timeout: seconds that a call to the owner may take.
        client_lost: see `CatalogServer`.
    """

    def __init__(
        self,
        tier: Tier,
        find_place: Callable[[], Place | None],
        make_local: Callable[[bool], LocalCatalog],
        call_timeout: float,
        client_lost: Callable[[], None],
    ) -> None:
        self._tier = tier
        self._find_place = find_place
        self._make_local = make_local
        self._call_timeout = call_timeout
        self._client_lost = client_lost
        self._problem = ""

    def hold(self, written: Callable[[], Sequence[Written]]) -> tuple[Owner | RemoteCatalog, Sequence[Written]] | None:
        """Try once.

        Args:
            written: tells which parts this process is writing by leave of an earlier owner.

        Returns:
            What this process is now, and the parts that the owner was told of; None when neither is possible.
        """
        try:
            place = self._find_place()
            if place is None:
                return Owner(self._make_local(False)), ()
            lock = self._acquire(place)
            outcome = self._join(place, written) if lock is None else self._own(place, lock, written)
        except (OSError, TierError) as error:
            if str(error) != self._problem:
                _log.warning("%s: no catalog for now: %s", self._tier.name, error)
            self._problem = str(error)
            return None
        self._problem = ""
        return outcome

    def _acquire(self, place: Place) -> OwnerLock | None:
        try:
            return OwnerLock.acquire(place.lock)
        except FileNotFoundError:
            next(iter(self._tier.scan()), None)  # somebody has removed the tier's folder; a tier makes it again
            return OwnerLock.acquire(place.lock)

    def _own(
        self, place: Place, lock: OwnerLock, written: Callable[[], Sequence[Written]]
    ) -> tuple[Owner, Sequence[Written]]:
        inherited = lock.inherited
        listener = None
        try:
            listener, address = listen(place)
            lock.announce(address)
            catalog = self._make_local(inherited)
        except BaseException:
            if listener is not None:
                listener.close()
            lock.release(clean=False)
            raise
        told = written()
        for part in told:
            catalog.adopt(part.part, part.nbytes, part.weight)
            if part.sealed:
                catalog.publish(part.part)
        return Owner(catalog, lock, CatalogServer(catalog, listener, address, self._client_lost)), told

    def _join(
        self, place: Place, written: Callable[[], Sequence[Written]]
    ) -> tuple[RemoteCatalog, Sequence[Written]] | None:
        address = owner_address(place)
        if address is None:
            return None
        try:
            catalog = RemoteCatalog(address, self._call_timeout)
        except (ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError):
            return None  # an owner that is not ready yet, or just leaving
        told = written()
        try:
            catalog.adopt(told)
        except Unanswered:
            catalog.close()
            return None
        return catalog, told
