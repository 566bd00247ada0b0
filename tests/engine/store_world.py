"""A KV store in a dictionary, with real copies in real threads, whose deliveries a test can hold, break and watch."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.core.config import StoreConfig
from headrace.store.keys import ChunkHasher
from headrace.store.layout import KVLayout
from headrace.store.load import Deliver, FoundChunk, FoundPart, LoadFailed
from headrace.store.opening import OpenedStore
from headrace.store.part import PartId, PartRange
from headrace.store.save import Pack, SaveSpec
from headrace.store.stats import StoreStats, TierStats


class MemoryLoad:
    """See `store.load.Load`."""

    def __init__(self, chunks: Sequence[FoundChunk], wanted: PartRange) -> None:
        self.left = {layer: len(chunks) for layer in wanted.layers}
        self.chunk_left = [len(wanted.layers)] * len(chunks)
        self.changed = threading.Condition()
        self.cancelled = False
        self.broken = False
        self.delivering = False
        self.bytes = 0
        self.units = len(chunks) * len(wanted.layers)

    @property
    def done(self) -> bool:
        return self.units == 0 or self.cancelled or self.broken

    @property
    def failed(self) -> bool:
        return self.broken

    @property
    def good_chunks(self) -> int:
        good = 0
        while good < len(self.chunk_left) and self.chunk_left[good] == 0:
            good += 1
        return good

    def ready(self, layer: int) -> bool:
        return self.left[layer] == 0

    def wait(self, layer: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.ready(layer) or self.done, 60)
            if not self.ready(layer):
                raise LoadFailed(self.good_chunks, "broken")

    def wait_all(self) -> None:
        for layer in self.left:
            self.wait(layer)

    def cancel(self) -> None:
        with self.changed:
            self.cancelled = True
            assert self.changed.wait_for(lambda: not self.delivering, 60)

    def bytes_by_tier(self) -> tuple[int, ...]:
        return (self.bytes - self.bytes // 3, self.bytes // 3)


class MemorySave:
    """See `store.save.Save`."""

    def __init__(self, store: "MemoryStore", spec: SaveSpec, pack: Pack) -> None:
        self.store, self.spec, self.pack = store, spec, pack
        part = spec.part.range
        nbytes = store.layout.payload_bytes(len(part.heads), spec.n_tokens)
        self.records = {layer: bytearray(nbytes) for layer in part.layers}
        self.waiting = set(part.layers)
        self.left = len(self.records)
        self.lock = threading.Lock()
        self.over = False

    @property
    def packed(self) -> bool:
        return self.over

    def layer_ready(self, layer: int) -> None:
        self.store.calls.append(("ready", self.spec.chunk, layer))
        assert layer in self.waiting, "a layer is ready once"
        self.waiting.discard(layer)
        self.store.submit(self._pack, layer)

    def _pack(self, layer: int) -> None:
        assert self.store.pack_gate.wait(60)
        with self.lock:
            if self.over:
                return
            self.pack(layer, memoryview(self.records[layer]))
            self.left -= 1
            if self.left == 0:
                self.store.parts[self.spec.part] = self.records
                self.over = True

    def cancel(self) -> None:
        with self.lock:
            self.over = True


@dataclass
class MemoryStore:
    """What an engine needs of a store.

    Attributes:
        parts: records of each part by layer.
        gate: closed, no record is delivered.
        hold_layer: with `gate` closed, layers before this one are delivered all the same.
        broken: parts that can be had no more: a load of them fails when it comes to `broken_layer`.
        unit_layers: layers that are delivered at once.
        most: parts it takes; more saves are refused.
    """

    parts: dict[PartId, dict[int, bytearray]] = field(default_factory=dict)
    hold_layer: int = 0
    broken: set[PartId] = field(default_factory=set)
    broken_layer: int = 0
    unit_layers: int = 1
    most: int = 1 << 30

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(8)
        self.gate = threading.Event()
        self.gate.set()
        self.pack_gate = threading.Event()
        self.pack_gate.set()
        self.batches: list[int] = []
        self.specs: list[SaveSpec] = []
        self.calls: list[tuple[str, int, int]] = []
        self.lookups: list[bool] = []
        self.leases: list[bytes] = []
        self.running: list[bool] = []
        self.closed = False
        self.work: list[Future[None]] = []

    def keys(self, tokens: NDArray[np.int32], salt: str = "", known: Sequence[bytes] = ()) -> list[bytes]:
        return self.hasher.extend(known, tokens, salt)

    def lookup(self, keys: Sequence[bytes], wanted: PartRange, count: bool = True) -> list[FoundChunk]:
        self.lookups.append(count)
        found = []
        for key in keys:
            if PartId(key, wanted) not in self.parts:
                break
            found.append(FoundChunk(key, self.layout.chunk_tokens, (FoundPart(wanted, (0, 1)),)))
        return found

    def load_batch(self, loads: Sequence[tuple[Sequence[FoundChunk], PartRange, Deliver]]) -> list[MemoryLoad]:
        self.batches.append(len(loads))
        made = []
        for chunks, wanted, deliver in loads:
            load = MemoryLoad(chunks, wanted)
            self.submit(self._bring, load, chunks, wanted, deliver)
            made.append(load)
        return made

    def _bring(self, load: MemoryLoad, chunks: Sequence[FoundChunk], wanted: PartRange, deliver: Deliver) -> None:
        for first in wanted.layers[:: self.unit_layers]:
            last = min(first + self.unit_layers, wanted.last_layer)
            for number, chunk in enumerate(chunks):
                while last > self.hold_layer and not self.gate.wait(0.01) and not load.cancelled:
                    pass
                with load.changed:
                    if load.cancelled:
                        return
                    part = PartId(chunk.key, wanted)
                    if part in self.broken and last > self.broken_layer:
                        load.broken = True
                        load.changed.notify_all()
                        return
                    load.delivering = True
                records = b"".join(self.parts[part][layer] for layer in range(first, last))
                deliver(number, part, first, last, memoryview(records))
                with load.changed:
                    load.delivering = False
                    for layer in range(first, last):
                        load.left[layer] -= 1
                    load.chunk_left[number] -= last - first
                    load.units -= last - first
                    load.bytes += len(records)
                    load.changed.notify_all()

    def save(self, spec: SaveSpec, pack: Pack) -> MemorySave | None:
        self.specs.append(spec)
        if spec.part in self.parts or len(self.parts) >= self.most:
            return None
        return MemorySave(self, spec, pack)

    def would_save(self, keys: Sequence[bytes], first: int, weight: float, wanted: PartRange) -> int:
        return len(keys) if len(self.parts) < self.most else 0

    def lease(self, keys: Sequence[bytes]) -> int:
        self.leases += keys
        return len(keys)

    def renew(self) -> None:
        pass

    def release(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.leases.remove(key)

    def forward(self, running: bool) -> None:
        assert not self.running or self.running[-1] != running
        self.running.append(running)

    def stats(self) -> StoreStats:
        return StoreStats(tiers=[TierStats(name="near"), TierStats(name="far")])

    def flush(self, timeout: float) -> bool:
        self.settle()
        return True

    def settle(self) -> None:
        """Return when everything submitted so far was done; raises what went wrong in a thread."""
        while self.work:
            self.work.pop().result(60)

    def submit(self, what: Callable[..., None], *arguments: object) -> None:
        """Do something in a thread."""
        self.work.append(self.pool.submit(what, *arguments))

    def close(self) -> None:
        self.closed = True

    def open(self, config: StoreConfig, layout: KVLayout) -> OpenedStore:
        """For `engine.build.build`."""
        self.layout = layout
        self.hasher = ChunkHasher(layout.fingerprint, layout.chunk_tokens)
        return OpenedStore(self, "in a dictionary")  # type: ignore[arg-type]
