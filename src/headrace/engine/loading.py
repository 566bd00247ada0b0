"""Stored prefixes on their way into the pool: started as one batch per step, waited for layer by layer."""

import threading
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.engine.kv_flow import NotArrived
from headrace.engine.kv_group import KVGroup
from headrace.engine.outcome import LoadOrder
from headrace.engine.split_load import SplitLoad
from headrace.kernels.attention import AttentionBackend
from headrace.store.load import Deliver, FoundChunk, Load, LoadFailed
from headrace.store.native.library import NativeCopy
from headrace.store.part import PartId, PartRange

#: A forward pass that stood still for so long for a load that brings nothing is given up; the load goes on.
STALL_SECONDS = 2.0
#: A load that brought nothing for so long is cancelled; what is missing is computed.
DEAD_SECONDS = 20.0
#: A waiting thread looks this often whether the load has failed, which nobody tells it.
LOOK_SECONDS = 0.01

#: Loads of a step of up to so many bytes together come layer by layer side by side, so that one forward pass can follow
#: them all. Larger ones come one after the other: the first can then be computed on while the others are on their way.
TOGETHER_BYTES = 64 << 20

#: Weight of the newest load in the pace of loads, and the least time that says something about it.
NEWEST, PACE_SECONDS = 0.5, 0.005

Batch = Seq[tuple[Seq[FoundChunk], PartRange, Deliver]]


class LoadStore(Protocol):
    """What loading needs of the KV store."""

    def load_batch(self, loads: Batch) -> Seq[Load]:
        """See `store.store.KVStore.load_batch`."""
        ...


def part_of(group: KVGroup) -> PartRange:
    """The layers and heads of a group: what it loads and saves of a chunk."""
    layers, heads = group.shape.layers, group.shape.heads
    return PartRange(layers.start, layers.stop, heads.start, heads.stop)


class Arrivals(threading.Condition):
    """Notified whenever a layer of a load is complete; counts the records of all loads."""

    records = 0


class PrefixLoad:
    """One sequence's load: the one owner of everything that still writes to the sequence's pages.

    Reading threads call `target` and `arrived`; all else belongs to the thread of the step loop, but `wait`, which a
    span elsewhere may call.

    Args:
        order: whose, and which tokens.
        chunks: what the store found, from the chunk in which `order.start` lies.
        chunk_tokens: tokens of a stored chunk.
        group: where the KV goes.
        come: what has come of all loads.
    """

    load: Load

    def __init__(
        self,
        order: LoadOrder,
        chunks: Seq[FoundChunk],
        chunk_tokens: int,
        group: KVGroup,
        come: Arrivals,
    ) -> None:
        self.order = order
        self.chunks = chunks
        self.first_chunk = order.start // chunk_tokens
        self._chunk_tokens = chunk_tokens
        self._group = group
        self._part = part_of(group)
        per_chunk = chunk_tokens // group.shape.page_size
        self._pages: list[NDArray[np.int64]] = [
            np.array(order.seq.pages[chunk * per_chunk : (chunk + 1) * per_chunk], np.int64)
            for chunk in range(self.first_chunk, self.first_chunk + len(chunks))
        ]
        self._missing = dict.fromkeys(group.shape.layers, 0)
        for chunk in chunks:
            for part in chunk.parts:
                area = part.read or part.range
                for layer in range(
                    max(area.first_layer, self._part.first_layer), min(area.last_layer, self._part.last_layer)
                ):
                    self._missing[layer] += 1
        self._come = come
        self._total = sum(self._missing.values())
        self._delivered = 0
        self._begun = self._moved = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first record came, and records of all loads by then
        self._last = 0  # records of all loads when the last came
        self.stalled = False

    def target(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> tuple[Any, ...]:
        """Where the records of some layers go, all heads that the part and the group have in common.

        Returns:
            The arguments of `AttentionBackend.load_records`.
        """
        own, has = self._part, part.range
        heads = range(max(has.first_head, own.first_head), min(has.last_head, own.last_head))
        begin = max(0, self.order.start - (self.first_chunk + chunk) * self._chunk_tokens)
        return (
            *self._group.span(range(first, last), heads),
            self._pages[chunk],
            begin,
            self.chunks[chunk].n_tokens,
            records,
            has.last_head - has.first_head,
            heads.start - has.first_head,
        )

    def arrived(self, first: int, last: int) -> None:
        """Records of some layers of a part are in their pages."""
        with self._come:
            complete = False
            for layer in range(first, last):
                self._missing[layer] -= 1
                complete |= not self._missing[layer]
            self._delivered += last - first
            self._moved = time.monotonic()
            self._come.records += last - first
            self._last = self._come.records
            if self._first is None:
                self._first = self._moved, self._last
            if complete:
                self._come.notify_all()

    def take(self) -> bool:
        """Take the first chunk back, for the model; False when it has come, or is not to be taken back."""
        if not isinstance(self.load, SplitLoad) or not self.load.take():
            return False
        start = (self.first_chunk + self.load.taken) * self._chunk_tokens
        self.order = replace(self.order, start=start)
        self.order.seq.hole = (start, self.order.end)
        return True

    @property
    def outstanding(self) -> float:
        """Chunks that have not come, in parts."""
        taken = self.load.taken if isinstance(self.load, SplitLoad) else 0
        return max(0.0, (self._total - self._delivered) * len(self.chunks) / self._total - taken)

    @property
    def holders(self) -> tuple[int, ...]:
        """Tiers that it comes from, as far as its first chunk tells."""
        return holders(self.chunks)

    @property
    def pace(self) -> float | None:
        """Records per second, of all loads, from its first to its last; None when that was too short to tell."""
        if self._first is None or self._moved - self._first[0] < PACE_SECONDS:
            return None
        return (self._last - self._first[1]) / (self._moved - self._first[0])

    @property
    def ended(self) -> bool:
        """No delivery comes any more."""
        return self.load.done

    @property
    def begun(self) -> bool:
        """The first layer is there: a forward pass can start and follow the load."""
        return self._missing[self._part.first_layer] == 0

    @property
    def hopeless(self) -> bool:
        """A forward pass should not follow it: it has failed, what still comes is being awaited; or it has stalled."""
        return self.load.failed or self.stalled

    @property
    def silent_seconds(self) -> float:
        """Time since the last delivery."""
        return time.monotonic() - self._moved

    def soon(self, seconds: float) -> bool:
        """True when at the pace so far the rest comes within so many seconds."""
        delivered = self._delivered
        passed = time.monotonic() - self._begun
        return delivered > 0 and passed * (self._total - delivered) <= seconds * delivered

    def wait(self, layer: int) -> float:
        """Return once this layer's KV lies in the pages; returns the seconds it took.

        Raises:
            NotArrived: it never will, or nothing has come for `STALL_SECONDS`.
        """
        if self.load.ready(layer):
            return 0.0
        begun = time.monotonic()
        with self._come:
            while self._missing[layer]:
                if self.load.failed:
                    raise NotArrived(f"stored KV of {self.order.seq.id} is not to be had")
                if time.monotonic() - max(self._moved, begun) > STALL_SECONDS:
                    self.stalled = True
                    raise NotArrived(f"stored KV of {self.order.seq.id} does not come")
                self._come.wait(LOOK_SECONDS)
        try:
            self.load.wait(layer)  # the last delivery is over, or about to be
        except LoadFailed as error:
            raise NotArrived(str(error)) from error
        return time.monotonic() - begun

    def end(self) -> int:
        """Let nothing be delivered any more; returns how many of the sequence's first tokens have arrived whole."""
        self.load.cancel()
        good = self.load.good_chunks
        return max(self.order.start, min(self.order.end, (self.first_chunk + good) * self._chunk_tokens if good else 0))


class Delivery:
    """Takes the records of a load that begins with chunk `first` of a prefix's. See `store.load.NativeDeliver`."""

    def __init__(self, item: PrefixLoad, backend: AttentionBackend, first: int = 0) -> None:
        self._item = item
        self._backend = backend
        self._first = first

    def __call__(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
        """Copy records into their pages."""
        self._backend.load_records(*self._item.target(self._first + chunk, part, first, last, records))
        self._item.arrived(first, last)

    def copy(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> NativeCopy | None:
        """What copies records into their pages."""
        call = self._backend.records_call(*self._item.target(self._first + chunk, part, first, last, records))
        return None if call is None else NativeCopy(*call)

    def arrived(self, chunk: int, part: PartId, first: int, last: int) -> None:
        """Records are in their pages."""
        self._item.arrived(first, last)


class Loads:
    """All loads of an engine, by sequence.

    Args:
        store: starts them.
        group: where KV goes.
        backend: copies it there.
        chunk_tokens: tokens of a stored chunk.
    """

    def __init__(self, store: LoadStore, group: KVGroup, backend: AttentionBackend, chunk_tokens: int) -> None:
        self._store = store
        self._group, self._backend = group, backend
        self._chunk_tokens = chunk_tokens
        self._part = part_of(group)
        self._come = Arrivals()
        self._active: dict[str, PrefixLoad] = {}
        self._plans: dict[int, list[PrefixLoad]] = {}
        self._paces: dict[tuple[int, ...], float] = {}  # records per second by the tiers that they came from
        self.started = 0
        self.failed = 0
        self.waited = 0.0

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[str]:
        return iter(self._active)

    def start(self, orders: Iterable[tuple[LoadOrder, Seq[FoundChunk]]]) -> None:
        """Hand the loads of a step to the store, all at once; each order comes with the chunks it covers."""
        batch: list[PrefixLoad] = []
        together = 0
        for order, found in orders:
            nbytes = (order.end - order.start) * self._group.shape.token_bytes
            if batch and together + nbytes > TOGETHER_BYTES:
                self._start(batch)
                batch, together = [], 0
            batch.append(PrefixLoad(order, found, self._chunk_tokens, self._group, self._come))
            together += nbytes
        if batch:
            self._start(batch)

    def start_split(self, order: LoadOrder, found: Seq[FoundChunk], sure: int) -> None:
        """Load a prefix from the back while the model computes what is before it.

        Args:
            order: whose.
            found: its chunks; those before number `sure` come one by one, the last first, and may be taken back.
            sure: see above; those from here on come first, layer by layer.
        """
        item = PrefixLoad(order, found, self._chunk_tokens, self._group, self._come)
        self.started += 1
        loads: list[tuple[int, Load]] = []
        self._backend.pages_free()
        for first, last in ((sure, len(found)), *((chunk, chunk + 1) for chunk in range(sure - 1, -1, -1))):
            if first < last:
                one = self._store.load_batch([(found[first:last], self._part, Delivery(item, self._backend, first))])
                loads.append((last - first, one[0]))
        item.load = SplitLoad(loads[::-1])
        self._active[order.seq.id] = item

    def _start(self, batch: Seq[PrefixLoad]) -> None:
        self.started += len(batch)
        self._backend.pages_free()
        loads = self._store.load_batch([(item.chunks, self._part, Delivery(item, self._backend)) for item in batch])
        for item, load in zip(batch, loads, strict=True):
            item.load = load
            self._active[item.order.seq.id] = item

    @property
    def splits(self) -> list[PrefixLoad]:
        """Loads beside which the model computes the front of the same prefix."""
        return [item for item in self._active.values() if item.order.seq.hole is not None]

    def chunk_seconds(self, chunks: Seq[FoundChunk]) -> float:
        """Seconds to load one of these chunks, as loads from the same tiers took lately; 0 before any did."""
        pace = self._paces.get(holders(chunks))
        return len(self._part.layers) / pace if pace else 0.0

    def absent(self, seconds: float) -> frozenset[str]:
        """Sequences to leave out while others can run: their KV has not come and will not come within `seconds`."""
        return frozenset(
            name
            for name, item in self._active.items()
            if not item.ended and _absent(item, item.hopeless or not (item.begun and item.soon(seconds)))
        )

    def not_begun(self) -> frozenset[str]:
        """Sequences to leave out although nothing else can run: not even their first layer has come."""
        return frozenset(
            name
            for name, item in self._active.items()
            if not item.ended and _absent(item, item.hopeless or not item.begun)
        )

    def submit(self, plan: int, seq_ids: Iterable[str]) -> bool:
        """Remember which loads a plan follows; False when there are none."""
        followed = [item for item in map(self._active.get, seq_ids) if item is not None and item.order.seq.hole is None]
        if followed:
            self._plans[plan] = followed
        return bool(followed)

    def wait(self, plan: int, layer: int) -> None:
        """Return once a layer's KV has come for all loads that the plan follows.

        Raises:
            NotArrived: for one of them it does not.
        """
        for item in self._plans.get(plan, ()):
            self.waited += item.wait(layer)

    def forget_plan(self, plan: int) -> list[PrefixLoad]:
        """The plan is over; returns the loads it followed that have not been ended."""
        return [item for item in self._plans.pop(plan, ()) if self._active.get(item.order.seq.id) is item]

    @property
    def online_come(self) -> bool:
        """True when the KV of an online sequence that is in no plan yet has come."""
        return any(
            item.ended and item.order.seq.online and not item.order.seq.in_flight for item in self._active.values()
        )

    def ended(self) -> list[PrefixLoad]:
        """Loads that have ended by themselves, or that died."""
        return [item for item in self._active.values() if item.ended or item.silent_seconds > DEAD_SECONDS]

    def of(self, seq_id: str) -> PrefixLoad | None:
        """The load of a sequence."""
        return self._active.get(seq_id)

    def end(self, item: PrefixLoad) -> tuple[int, Seq[int]]:
        """Take a load out of the set; when this returns nothing writes to its sequence's pages any more.

        Returns:
            How many of the sequence's first tokens lie in the pool, and the bytes that came from each tier.
        """
        died = item.silent_seconds > DEAD_SECONDS
        tokens = item.end()
        pace = item.pace
        if pace is not None:
            known = self._paces.get(item.holders, pace)
            self._paces[item.holders] = known + NEWEST * (pace - known)
        del self._active[item.order.seq.id]
        if item.load.failed or (died and tokens < item.order.end):
            self.failed += 1
        return tokens, item.load.bytes_by_tier()

    def rest(self, seconds: float) -> None:
        """Return when a layer of some load has come, at the latest after so many seconds."""
        with self._come:
            self._come.wait(seconds)


def _absent(item: PrefixLoad, pending: bool) -> bool:
    """True when a sequence has nothing to compute: not before its load either, where that has left it the front."""
    seq = item.order.seq
    return pending if seq.hole is None else seq.plannable < 1


def holders(chunks: Seq[FoundChunk]) -> tuple[int, ...]:
    """Tiers that hold the first of some chunks."""
    return chunks[0].parts[0].tiers if chunks else ()
