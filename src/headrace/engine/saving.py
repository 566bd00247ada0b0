"""New KV on its way to the store: pages are lent to writing threads until they are packed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.engine.kv_group import KVGroup
from headrace.engine.loading import part_of
from headrace.engine.sequence_pages import SequencePages
from headrace.kernels.attention import AttentionBackend
from headrace.store.part import PartId
from headrace.store.save import Pack, Save, SaveSpec

#: Saves may keep this share of the pool's pages from being used again; what would go beyond is not saved.
POOL_SHARE = 0.25


class SaveStore(Protocol):
    """What saving needs of the KV store."""

    def save(self, spec: SaveSpec, pack: Pack) -> Save | None:
        """See `store.store.KVStore.save`."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """A full chunk of a sequence as it is saved.

    Attributes:
        key: its key.
        parent: key of the chunk before it, if there is one.
        number: of the chunk in its prefix, from 0.
        pages: that hold it.
        salt_tag: see `SaveSpec`.
        weight: seconds to compute it.
    """

    key: bytes
    parent: bytes | None
    number: int
    pages: list[int]
    salt_tag: bytes
    weight: float


@dataclass(frozen=True, slots=True)
class ChunkSave:
    """A save under way and the pages lent to it."""

    key: bytes
    save: Save
    pages: list[int]


class Saves:
    """All saves of an engine. They never hold work up: when nothing can run for want of pages, they are given up.

    Args:
        store: takes them.
        pages: lends pages.
        group: where the KV lies.
        backend: copies it out of pages.
        chunk_tokens: tokens of a chunk.
    """

    def __init__(
        self, store: SaveStore, pages: SequencePages, group: KVGroup, backend: AttentionBackend, chunk_tokens: int
    ) -> None:
        self._store = store
        self._pool = pages
        self._group, self._backend = group, backend
        self._chunk_tokens = chunk_tokens
        self._part = part_of(group)
        self._active: list[ChunkSave] = []
        self._on_its_way: dict[bytes, ChunkSave] = {}
        self._plans: dict[int, list[ChunkSave]] = {}
        self.skipped = 0

    def __len__(self) -> int:
        return len(self._active)

    def begin(self, chunk: ChunkSource) -> ChunkSave | None:
        """Offer a chunk; None when it is on its way, the store does not take it, or too many pages are lent already."""
        if chunk.key in self._on_its_way:  # sequences that share a prefix
            return None
        if self._pool.lent + len(chunk.pages) > POOL_SHARE * self._pool.total:
            self.skipped += 1
            return None
        spec = SaveSpec(
            PartId(chunk.key, self._part),
            self._chunk_tokens,
            chunk.number,
            chunk.weight,
            chunk.salt_tag,
            chunk.parent,
        )
        numbers: NDArray[np.int64] = np.array(chunk.pages, np.int64)

        def pack(layer: int, record: memoryview) -> None:
            k, v = self._group.planes(layer)
            self._backend.save_record(k, v, numbers, self._chunk_tokens, record)

        save = self._store.save(spec, pack)
        if save is None:
            return None
        self._pool.lend(chunk.pages)
        item = ChunkSave(chunk.key, save, chunk.pages)
        self._on_its_way[chunk.key] = item
        self._active.append(item)
        return item

    def whole(self, item: ChunkSave) -> None:
        """All layers of the chunk are in the pool."""
        self._backend.kv_written()
        for layer in self._group.shape.layers:
            item.save.layer_ready(layer)

    def submit(self, plan: int, items: Iterable[ChunkSave]) -> bool:
        """Remember which saves a plan's layers complete; False when there are none."""
        own = list(items)
        if own:
            self._plans[plan] = own
        return bool(own)

    def offer(self, plan: int, layer: int) -> None:
        """A layer of a plan is in the pool."""
        items = self._plans.get(plan)
        if not items:
            return
        self._backend.kv_written()
        for item in items:
            item.save.layer_ready(layer)

    def forget_plan(self, plan: int, give_up: bool = False) -> None:
        """The plan is over; with `give_up` its KV is not to be saved."""
        for item in self._plans.pop(plan, ()):
            if give_up:
                item.save.cancel()
                self._forget(item)  # the chunk will be offered again

    def settle(self) -> None:
        """Take back pages that are packed."""
        if not self._active:
            return
        still = []
        for item in self._active:
            if item.save.packed:
                self._pool.end_loan(item.pages)
                self._forget(item)
            else:
                still.append(item)
        self._active = still

    def _forget(self, item: ChunkSave) -> None:
        if self._on_its_way.get(item.key) is item:
            del self._on_its_way[item.key]

    def cancel(self) -> None:
        """Give all up; their pages come back with `settle` as soon as no thread copies from them."""
        for item in self._active:
            item.save.cancel()
