"""A part on its way from the engine's memory to tiers: packed layer by layer into one aligned buffer."""

import logging
import threading
from typing import Protocol

from headrace.store.buffers import Buffer
from headrace.store.header import record_sum
from headrace.store.layout import HEADER_BYTES
from headrace.store.part import PartId
from headrace.store.save import Pack, SaveSpec

log = logging.getLogger("headrace.store")


class SaveOwner(Protocol):
    """What a save tells: the writer that it belongs to."""

    def ready(self, save: "PartSave", layer: int) -> None:
        """A layer of a save is there to be packed."""
        ...

    def given_up(self, save: "PartSave") -> None:
        """A save ended before it was packed."""
        ...


class PartWork:
    """A part in memory on its way to tiers."""

    __slots__ = ("buffer", "cancelled", "left", "nbytes", "part", "reached", "refused", "source", "then", "weight")

    def __init__(self, part: PartId, nbytes: int, weight: float, buffer: Buffer, left: int) -> None:
        self.part = part
        self.nbytes = nbytes
        self.weight = weight
        self.buffer = buffer
        self.left = left  # tiers that have not had their turn
        self.reached = 0  # tiers that have it now
        self.refused = 0  # tiers that did not want it
        self.cancelled = False
        self.source: int | None = None  # the tier that it is still to be read from
        self.then: tuple[int, ...] = ()  # tiers to go to once it was read


class PartSave:
    """A `save.Save`: owns the part's buffer until all layers are packed."""

    __slots__ = ("_lock", "_pack", "_packed", "_packing", "_waiting", "_writer", "spec", "sums", "tiers", "work")

    def __init__(self, writer: SaveOwner, spec: SaveSpec, pack: Pack, tiers: tuple[int, ...], work: PartWork) -> None:
        self._writer = writer
        self._pack: Pack | None = pack
        self._packed = False
        self._packing = False
        self._waiting = set(spec.part.range.layers)
        self._lock = threading.Lock()
        self.spec = spec
        self.tiers = tiers
        self.work = work
        self.sums: dict[int, int] = {}

    @property
    def complete(self) -> bool:
        """All layers are there to be packed, or were."""
        return not self._waiting

    @property
    def packed(self) -> bool:
        """True once `pack` will not be called any more: the source may be overwritten."""
        return self._packed

    def layer_ready(self, layer: int) -> None:
        """The source of this model layer is complete; it may be packed from now on. A second time does nothing."""
        with self._lock:
            if layer not in self._waiting or self._packed:
                return
            self._waiting.remove(layer)
        self._writer.ready(self, layer)

    def cancel(self) -> None:
        """Give up: nothing more is published, and `packed` turns true once a call of `pack` under way is over."""
        with self._lock:
            if self.work.cancelled:
                return
            self.work.cancelled = True
            if self._packed or self._packing:
                return  # whoever has it now sees the flag
            self._end()
        self._writer.given_up(self)

    def pack_layer(self, layer: int, nbytes: int) -> bool:
        """Pack a layer of `nbytes` bytes and take its sum, in the packing thread.

        Returns:
            True when this was the last one, and the part is to be sent on.
        """
        with self._lock:
            if self._packed:
                return False  # given up
            pack, self._packing = self._pack, True
        assert pack is not None
        covers = self.spec.part.range
        size = (self.work.nbytes - HEADER_BYTES) // len(covers.layers)
        offset = HEADER_BYTES + (layer - covers.first_layer) * size
        try:
            with self.work.buffer.view[offset : offset + size] as record:
                with record[:nbytes] as payload:
                    pack(layer, payload)
                record[nbytes:] = bytes(size - nbytes)  # what an earlier part left there is nobody's business
                self.sums[layer] = record_sum(record)
        except Exception:  # of the engine's function: its part is lost, the thread is not
            log.exception("a part could not be packed")
            self.work.cancelled = True
        with self._lock:
            self._packing = False
            done, given_up = len(self.sums) == len(covers.layers), self.work.cancelled
            if done or given_up:
                self._end()
        if given_up:
            self._writer.given_up(self)
        return done and not given_up

    def _end(self) -> None:
        self._packed = True
        self._pack = None  # and with it what it holds of the engine's
