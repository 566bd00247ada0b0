"""The engine's side of the KV store: what to load, what to save, and how far both are, between and within steps.

What is stored: full chunks of prompt and generated tokens alike, all layers and heads of the group, also those outside
a layer's sliding window (the pool keeps them too; a later request may need any of them). A chunk is offered once, when
the plan that completes it is submitted, and layer by layer as the plan computes; one that a decode token completes is
offered whole after its step. So a sequence that ends or is preempted has nothing left to save.

What is loaded: at admission, full chunks that the store has and the pool has not. The pages enter the prefix index when
all of it has come and was verified.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import StepPlan
from headrace.engine.kv_flow import KVSink, KVSource
from headrace.engine.kv_group import KVGroup
from headrace.engine.loading import Loads, LoadStore, PrefixLoad, part_of
from headrace.engine.meeting_point import split, takes
from headrace.engine.outcome import LoadOrder
from headrace.engine.prefix_leases import LeaseStore, PrefixLeases
from headrace.engine.saving import ChunkSave, ChunkSource, Saves, SaveStore
from headrace.engine.sequence import Sequence
from headrace.engine.sequence_pages import SequencePages
from headrace.kernels.attention import AttentionBackend
from headrace.store.keys import salt_tag
from headrace.store.load import FoundChunk
from headrace.store.stats import StoreStats

#: What a lookup found is taken as true for so long while the sequence waits for its admission.
LOOKUP_SECONDS = 1.0
#: What it found so long ago is as good as found now.
FRESH_SECONDS = 0.01
STATS_SECONDS = 1.0

#: Seconds it takes to compute so many tokens from a position on.
ComputeTime = Callable[[int, int], float]
#: A load that has ended: its order, the tokens that are in the pool, bytes by tier. Goes to `Scheduler.loaded`.
Arrival = tuple[LoadOrder, int, dict[str, int]]


class FlowStore(LoadStore, SaveStore, LeaseStore, Protocol):
    """What an engine needs of the KV store; `store.store.KVStore` is one."""

    def keys(self, tokens: NDArray[np.int32], salt: str = "", known: Seq[bytes] = ()) -> list[bytes]:
        """See `KVStore.keys`."""
        ...

    def forward(self, running: bool) -> None:
        """See `KVStore.forward`."""
        ...

    def stats(self) -> StoreStats:
        """See `KVStore.stats`."""
        ...

    def flush(self, timeout: float) -> bool:
        """See `KVStore.flush`."""
        ...

    def close(self) -> None:
        """See `KVStore.close`."""
        ...


@dataclass(slots=True)
class StoredPrefix:
    """What is known of a sequence's chunks.

    Attributes:
        keys: of its first chunks, as far as they were needed.
        first: number of the first chunk that the store was asked for last.
        found: chunks that it had, from that one on.
        asked: when that was; negative: ask again.
        counted: it was asked before.
        offered: chunks for which saving is decided: stored, on their way, or refused.
    """

    keys: list[bytes] = field(default_factory=list)
    first: int = 0
    found: list[FoundChunk] = field(default_factory=list)
    asked: float = -1.0
    counted: bool = False
    offered: int = 0


class StoreFlow(KVSource, KVSink):
    """Loads and saves of one engine over one KV group. Belongs to the thread of the step loop, but `wait` and `offer`.

    Args:
        store: the store.
        group: where KV lies.
        backend: copies records.
        pages: lends pages to saves.
        chunk_tokens: tokens of a stored chunk, a multiple of the page size.
        compute_time: the price of a chunk.
        recompute: whether the model may compute stored prefixes from the front where storage is slow.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        store: FlowStore,
        group: KVGroup,
        backend: AttentionBackend,
        pages: SequencePages,
        chunk_tokens: int,
        compute_time: ComputeTime,
        recompute: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if chunk_tokens % group.shape.page_size:
            raise ValueError(f"chunks of {chunk_tokens} tokens are not whole pages of {group.shape.page_size}")
        self._store = store
        self._wanted = part_of(group)
        self._chunk_tokens = chunk_tokens
        self._page_size = group.shape.page_size
        self._compute_time = compute_time
        self._loads = Loads(store, group, backend, chunk_tokens)
        self._saves = Saves(store, pages, group, backend, chunk_tokens)
        self._leases = PrefixLeases(store, self._wanted, chunk_tokens, compute_time, clock)
        self._clock = clock
        self._known: dict[str, StoredPrefix] = {}
        self._recompute = recompute
        self._split: dict[str, int] = {}  # an admitted sequence -> its first chunk that is surely loaded
        self._running = False
        self._stats = store.stats()
        self._stats_at = clock()
        self._tiers = [tier.name for tier in self._stats.tiers]

    # -- what the scheduler asks -------------------------------------------------------------------------------------

    def stored(self, seq: Sequence) -> int:
        """Tokens of a sequence's prefix that the store has; at least its last token is left to compute.

        A sequence that wants prompt log-probabilities computes everything: they come from the forward pass.
        """
        if seq.request.params.prompt_logprobs is not None:
            return 0
        known = self._known.setdefault(seq.id, StoredPrefix())
        now = self._clock()
        if known.asked < 0 or now - known.asked > LOOKUP_SECONDS:
            count = (seq.length - 1) // self._chunk_tokens
            keys = self._keys(seq, known, count)
            known.found = self._store.lookup(keys[:count], self._wanted, not known.counted) if count else []
            known.first, known.asked, known.counted = 0, now, True
            known.offered = len(known.found)
        return len(known.found) * self._chunk_tokens

    def claim(self, seq: Sequence, tokens: int) -> int | None:
        """A sequence is admitted of which so many tokens are in the pool or stored; the rest is to be computed.

        Returns:
            The token up to which it may be computed, because another engine computes those that follow; None: all.
        """
        if seq.request.params.prompt_logprobs is not None:
            return None
        known = self._known.setdefault(seq.id, StoredPrefix())
        count = seq.length // self._chunk_tokens
        keys = self._keys(seq, known, count)[:count]
        return self._leases.claim(seq, keys, tokens, self._clock() - known.asked < FRESH_SECONDS)

    def leave(self, seq_id: str) -> None:
        """A sequence gives its pages back: what it has not computed it computes no more."""
        self._leases.leave(seq_id)

    def meet(self, seq: Sequence, held: int, stored: int) -> int | None:
        """The token from which on a stored prefix is to be loaded while the model computes those before it.

        One prefix at a time is split: there is one model.

        Args:
            seq: whose.
            held: tokens that are in the pool.
            stored: tokens that the store has.

        Returns:
            None when all of it is to be loaded.
        """
        size = self._chunk_tokens
        first = held // size
        chunk_seconds = self._loads.chunk_seconds(self._known[seq.id].found[first:])
        if not self._recompute or not chunk_seconds or self._split or self._loads.splits:
            return None
        edges: list[int] = [held, *range((first + 1) * size, stored + 1, size)]
        costs = [self._compute_time(start, end - start) for start, end in itertools.pairwise(edges)]
        found = split(costs, chunk_seconds)
        if found is None:
            return None
        self._split = {seq.id: first + found.sure}
        return edges[found.first]

    # -- loads ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """True while some sequence waits for what another engine computes."""
        return self._leases.waiting

    def look(self) -> list[tuple[Sequence, int, int | None]]:
        """Before a plan is made: what has become of that. Arguments for `Scheduler.advance`."""
        moved = []
        for look in self._leases.look():
            known = self._known[look.seq.id]
            known.first, known.found, known.asked = look.first, look.found, -1.0
            end = look.first + len(look.found)
            if known.offered >= look.first:
                known.offered = max(known.offered, end)
            moved.append((look.seq, end * self._chunk_tokens, look.fence))
        return moved

    @property
    def loading(self) -> bool:
        """True while some load is under way."""
        return len(self._loads) > 0

    def start(self, orders: Seq[LoadOrder]) -> None:
        """Begin all loads of a step at once."""
        size = self._chunk_tokens
        batch = []
        for order in orders:
            known = self._known[order.seq.id]
            known.asked = -1.0
            chunks = known.found[order.start // size - known.first : order.end // size - known.first]
            sure = self._split.pop(order.seq.id, None)
            if sure is None:
                batch.append((order, chunks))
            else:
                self._loads.start_split(order, chunks, sure - order.start // size)
        self._loads.start(batch)

    def hand_over(self) -> None:
        """Before a plan is made: where the model has come to a chunk that storage would bring later, it takes it."""
        for item in self._loads.splits:
            seq = item.order.seq
            if not seq.plannable:
                cost = self._compute_time(seq.scheduled, self._chunk_tokens)
                outstanding = item.outstanding * self._loads.chunk_seconds(item.chunks)
                if takes(cost, max(outstanding, item.silent_seconds)):
                    item.take()

    def absent(self, seconds: float) -> frozenset[str]:
        """Sequences to leave out of a plan while there is other work: those whose load will take longer than this."""
        return self._loads.absent(seconds) if len(self._loads) else _NOBODY

    def not_begun(self) -> frozenset[str]:
        """Sequences to leave out also when there is no other work: a forward pass would wait before its first layer."""
        return self._loads.not_begun()

    def settle(self) -> list[Arrival]:
        """Between steps: take back pages of packed saves, and report loads that have ended or failed.

        A failed one of a sequence in flight is reported once its plans are given up.
        """
        self._saves.settle()
        self._leases.renew()
        if not len(self._loads):
            return []
        return [
            self._arrival(item)
            for item in self._loads.ended()
            if not (item.order.seq.in_flight and (item.load.failed or not item.ended))
        ]

    def cancel(self, seq_id: str) -> list[Arrival]:
        """End a sequence's load; when this returns nothing writes to its pages any more."""
        item = self._loads.of(seq_id)
        return [] if item is None else [self._arrival(item)]

    def rest(self, seconds: float) -> None:
        """Nothing can run: return when a layer of some load has come, at the latest after so many seconds."""
        self._loads.rest(seconds)

    # -- around a plan ----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, sequences: Seq[Sequence]) -> tuple[KVSource, KVSink] | None:
        """A plan is about to be submitted; returns what its layers must call, or None when they need not."""
        follows = len(self._loads) > 0 and self._loads.submit(plan.id, (chunk.seq for chunk in plan.chunks))
        saves: list[ChunkSave] = []
        for chunk, seq in zip(plan.chunks, sequences, strict=True):
            if chunk.phase == "prefill":
                saves += self._offer(seq, chunk.start, chunk.end)
        return (self, self) if self._saves.submit(plan.id, saves) or follows else None

    def wait(self, plan: StepPlan, layer: int) -> None:
        """See `KVSource.wait`."""
        self._loads.wait(plan.id, layer)

    def offer(self, plan: StepPlan, layer: int) -> None:
        """See `KVSink.offer`."""
        self._saves.offer(plan.id, layer)

    def complete(self, plan: StepPlan, sequences: Callable[[str], Sequence]) -> list[Arrival]:
        """A plan is done, its result not yet taken: save chunks that decode tokens completed, end loads it followed."""
        size = self._chunk_tokens
        for chunk in plan.chunks:
            if chunk.phase == "decode" and chunk.end % size < chunk.length:
                for save in self._offer(sequences(chunk.seq), chunk.end, chunk.end):
                    self._saves.whole(save)
        self._saves.forget_plan(plan.id)
        arrivals = []
        for item in self._loads.forget_plan(plan.id):
            arrival = self._arrival(item)
            if arrival[1] < item.order.end:
                raise AssertionError(f"{item.order.seq.id} was computed on KV that had not come")
            arrivals.append(arrival)
        for chunk in plan.chunks:  # one that ends with this plan, of whose prefix storage still loads the rest
            if sequences(chunk.seq).doomed is not None:
                arrivals += self.cancel(chunk.seq)
        return arrivals

    def give_up(self, plan: StepPlan, sequences: Callable[[str], Sequence]) -> list[Arrival]:
        """A plan is abandoned: its KV is not to be saved, and who ends with it must not be loading any more."""
        self._saves.forget_plan(plan.id, give_up=True)
        self._loads.forget_plan(plan.id)
        arrivals = []
        for chunk in plan.chunks:
            known = self._known.get(chunk.seq)
            if known is not None and chunk.phase == "prefill":
                known.offered = min(known.offered, chunk.start // self._chunk_tokens)
            if sequences(chunk.seq).doomed is not None:
                arrivals += self.cancel(chunk.seq)
        return arrivals

    def forward(self, running: bool) -> None:
        """A forward pass begins or ends."""
        if running != self._running:
            self._running = running
            self._store.forward(running)

    # -- the rest ---------------------------------------------------------------------------------------------------

    def forget(self, seq_id: str) -> None:
        """The sequence has ended."""
        self._known.pop(seq_id, None)

    def reclaim(self) -> bool:
        """Give saves up, because nothing can run for want of pages; False when there are none."""
        self._saves.cancel()
        return len(self._saves) > 0

    def clear_loads(self) -> list[Arrival]:
        """End all loads."""
        return [arrival for seq_id in list(self._loads) for arrival in self.cancel(seq_id)]

    def clear(self) -> list[Arrival]:
        """End all loads and saves, e.g. because pages are about to be moved. Waits for copies under way."""
        arrivals = self.clear_loads()
        self._saves.cancel()
        self._saves.settle()
        while len(self._saves):
            self._loads.rest(0.001)
            self._saves.settle()
        return arrivals

    def stats(self, idle: bool = False) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """The store's counters and its tiers', at most about a second old; of now where nothing follows (`idle`)."""
        now = self._clock()
        if idle or now - self._stats_at > STATS_SECONDS:
            self._stats, self._stats_at = self._store.stats(), now
        leases = self._leases
        whole, tiers = flat(self._stats)
        whole["saves_skipped"] = self._saves.skipped
        whole |= {"waits": leases.waits, "wait_seconds": leases.waited, "waits_given_up": leases.given_up}
        return whole, tiers

    @property
    def loads(self) -> Loads:
        """Counters of loads."""
        return self._loads

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless loads are those of sequences that load, and nothing is kept of others."""
        everyone = list(sequences)
        self._leases.check([seq for seq in everyone if seq.state == "running"])
        live = {seq.id: seq.loading for seq in everyone}
        loading = {seq_id for seq_id, is_loading in live.items() if is_loading}
        if loading != set(self._loads):
            raise AssertionError(f"loading are {sorted(loading)}, loads are of {sorted(self._loads)}")
        if not self._known.keys() <= live.keys():
            raise AssertionError("stored prefixes of ended sequences are kept")

    def close(self, timeout: float) -> bool:
        """Write what waits for it for at most `timeout` seconds, and let go of the tiers. No load is under way."""
        written = self._store.flush(timeout)
        self._store.close()
        self._saves.settle()
        return written

    def _arrival(self, item: PrefixLoad) -> Arrival:
        tokens, tier_bytes = self._loads.end(item)
        if tokens < item.order.end:
            known = self._known[item.order.seq.id]
            known.offered = min(known.offered, tokens // self._chunk_tokens)
        return item.order, tokens, dict(zip(self._tiers, tier_bytes, strict=True))

    def _keys(self, seq: Sequence, known: StoredPrefix, count: int) -> list[bytes]:
        if len(known.keys) < count:
            tokens = seq.tokens[: count * self._chunk_tokens]
            known.keys = self._store.keys(tokens, seq.request.cache_salt, known.keys)
        return known.keys

    def _offer(self, seq: Sequence, start: int, end: int) -> list[ChunkSave]:
        """Offer a sequence's chunks up to token `end` that were not; those before `start` are in the pool already.

        Returns:
            Saves of chunks that still wait for layers.
        """
        size = self._chunk_tokens
        known = self._known.setdefault(seq.id, StoredPrefix())
        known.asked = -1.0
        last = end // size
        if last <= known.offered:
            return []
        keys = self._keys(seq, known, last)
        pages = size // self._page_size
        tag = salt_tag(seq.request.cache_salt)
        waiting = []
        for number in range(known.offered, last):
            save = self._saves.begin(
                ChunkSource(
                    keys[number],
                    keys[number - 1] if number else None,
                    number,
                    seq.pages[number * pages : (number + 1) * pages],
                    tag,
                    self._compute_time(number * size, size),
                )
            )
            if save is None:
                continue
            if (number + 1) * size <= start and start < end:
                self._saves.whole(save)
            else:
                waiting.append(save)
        known.offered = last
        self._leases.offered(seq.id, last)
        return waiting


_NOBODY: frozenset[str] = frozenset()


def flat(stats: StoreStats) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Counters of a store and of its tiers as plain numbers by name."""
    whole = {name: value for name, value in msgspec.to_builtins(stats).items() if isinstance(value, int | float)}
    whole |= {f"decisions_{name}": count for name, count in stats.decisions.items()}
    whole["write_amplification"] = stats.write_amplification
    tiers = {
        tier.name: {name: float(value) for name, value in msgspec.to_builtins(tier).items() if name != "name"}
        for tier in stats.tiers
    }
    return whole, tiers
