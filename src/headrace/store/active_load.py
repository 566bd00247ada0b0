"""A load under way: what has arrived of it, and those who wait for it."""

import threading
from collections.abc import Callable

from headrace.store.fetch import Layers
from headrace.store.load import Deliver, LoadFailed, NativeDeliver
from headrace.store.native.library import claim
from headrace.store.part import PartRange
from headrace.store.read_unit import ReadUnit, State


class ActiveLoad:
    """See `load.Load`.

    Args:
        number: unique among the loads of a reader.
        n_chunks: chunks to load.
        wanted: layers and heads wanted.
        n_tiers: tiers it may come from.
        deliver: who gets the records.
        lock: the reader's.
        hasten: tells the reader that somebody waits; called with its lock held.
        take_back: tells the reader to cancel units; called with its lock held.
    """

    def __init__(
        self,
        number: int,
        n_chunks: int,
        wanted: PartRange,
        n_tiers: int,
        deliver: Deliver,
        lock: threading.Lock,
        hasten: Callable[["ActiveLoad"], None],
        take_back: Callable[[list[ReadUnit[Layers]]], None],
    ) -> None:
        self.number = number
        self.deliver = deliver
        self.native = deliver if isinstance(deliver, NativeDeliver) else None
        self.units: list[ReadUnit[Layers]] = []
        self._lock = lock
        # Who waits has nothing to do with the lock that all reading threads are after: it sleeps on a gate of its own,
        # shown here before it looks whether it has to. Gates are opened after what was waited for has changed.
        self._gates: list[tuple[threading.Lock, int | None]] = []
        self._hasten = hasten
        self._take_back = take_back
        self._layer_left = [0] * wanted.last_layer
        self._chunk_left = [0] * n_chunks
        self._units_left = 0
        self._good = 0
        self._lost: int | None = None
        self._failed = False
        self._why = ""
        self._cause: Exception | None = None
        self._hastened = False
        self._bytes = [0] * n_tiers

    # What the owner sees.

    @property
    def done(self) -> bool:
        """Everything has arrived, or it has failed; no delivery comes any more."""
        return not self._units_left

    @property
    def failed(self) -> bool:
        """Some chunk cannot be had. The chunks before it still arrive, until `done`."""
        return self._failed

    @property
    def good_chunks(self) -> int:
        """Chunks from the first that have arrived whole."""
        return self._good

    def ready(self, layer: int) -> bool:
        """True once all records of this model layer were delivered; also when none is wanted."""
        return layer >= len(self._layer_left) or not self._layer_left[layer]

    def wait(self, layer: int) -> None:
        """Return once `ready(layer)`.

        Raises:
            LoadFailed: it never will be; the chunks before the one that failed have arrived by then.
        """
        if not self.ready(layer):
            self._tell()
            self._sleep(layer)
            if not self.ready(layer):
                raise LoadFailed(self._good, self._why) from self._cause

    def wait_all(self) -> None:
        """Return once every layer is ready.

        Raises:
            LoadFailed: one never will be.
        """
        if self._units_left:
            self._tell()
            self._sleep(None)
        if self._lost is not None:
            raise LoadFailed(self._good, self._why) from self._cause

    def cancel(self) -> None:
        """Take units nobody reads yet back, and return when the last delivery is over. Idempotent.

        Not to be called in `deliver`.
        """
        with self._lock:
            if self._units_left:
                self._lose(0, "the load was cancelled")
        self._sleep(None)

    def bytes_by_tier(self) -> tuple[int, ...]:
        """Bytes delivered so far, by tier number (the winners' only)."""
        return tuple(self._bytes)

    def _tell(self) -> None:
        """Tell the reader, once, that somebody waits."""
        if not self._hastened:
            self._hastened = True
            with self._lock:
                self._hasten(self)

    def _sleep(self, layer: int | None) -> None:
        """Return once the layer is ready, if one is given, or everything is over."""
        gate = threading.Lock()
        gate.acquire()
        mine = (gate, layer)
        self._gates.append(mine)
        while self._units_left and (layer is None or self._layer_left[layer]):
            gate.acquire()
        self._gates.remove(mine)

    def _wake(self) -> None:
        """Open the gates of those who have nothing to wait for. With the reader's lock held."""
        for gate, layer in tuple(self._gates):
            if gate.locked() and (not self._units_left or (layer is not None and not self._layer_left[layer])):
                gate.release()

    # What the reader tells, with the lock held.

    def expect(self, layers: dict[tuple[int, int], int], chunks: list[int]) -> None:
        """Set what is to arrive, before the first unit is taken.

        Args:
            layers: how many parts deliver layers [first, last).
            chunks: layers of parts that each chunk consists of.
        """
        for (first, last), parts in layers.items():
            for layer in range(first, last):
                self._layer_left[layer] += parts
        self._chunk_left = chunks
        self._units_left = len(self.units)
        self._advance()

    def delivered(self, unit: ReadUnit[Layers], tier: int) -> None:
        """A unit's records were delivered."""
        source, first, last = unit.what
        for layer in range(first, last):
            self._layer_left[layer] -= 1
        self._chunk_left[source.chunk] -= last - first
        self._bytes[tier] += unit.nbytes
        self._advance()
        self._close(1)
        if self._gates:
            self._wake()

    def undelivered(self, unit: ReadUnit[Layers], error: Exception) -> None:
        """A unit was read but could not be delivered: a fault of whoever asked."""
        self._cause = self._cause or error
        self.lost(unit, f"records could not be delivered: {error}")

    def lost(self, unit: ReadUnit[Layers], why: str) -> None:
        """A unit can be had from no tier."""
        self._failed = True
        self._lose(unit.what[0].chunk, why)
        self._close(1)
        self._wake()

    def give_up(self, why: str) -> None:
        """Nobody will read this load any more."""
        self._failed = True
        self._lose(0, why)
        self._wake()

    def _lose(self, chunk: int, why: str) -> None:
        """Do without this chunk and all after it."""
        if self._lost is not None and chunk >= self._lost:
            return
        self._why, self._lost = why, chunk
        # One that an attempt has claimed is being delivered; it will be told.
        open_units = [
            unit
            for unit in self.units
            if unit.what[0].chunk >= chunk
            and unit.state in (State.PENDING, State.READING)
            and claim(unit.what[0].flag(unit.what[1]))
        ]
        self._take_back(open_units)
        self._close(len(open_units))

    def _close(self, units: int) -> None:
        """So many units have met their fate. Last of all changes: those who wait look at this without the lock."""
        self._units_left -= units
        if not self._units_left:
            self.units = []

    def _advance(self) -> None:
        while self._good < len(self._chunk_left) and not self._chunk_left[self._good]:
            self._good += 1
