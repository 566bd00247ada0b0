"""The layer pipeline: a stored prefix loads while a new suffix is computed on it, and both take equally long.

A tier is throttled so that it gives a layer of the prefix in the time in which a layer of the suffix is computed. Then
a request over both should take as long as one of them, not as their sum. New chunks are saved to the tier meanwhile.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.bench.local_engine import with_scheduler
from headrace.bench.parity_prompts import random_prompts
from headrace.bench.progress import progress
from headrace.bench.row_copier import RowCopier
from headrace.bench.store_chunks import chunk_bytes, scratch_tiers, whole
from headrace.core.config import EngineConfig, StoreConfig
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.events import Delta
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.store.layout import KVLayout
from headrace.store.load import Deliver, FoundChunk, Load, NativeDeliver
from headrace.store.opening import OpenedStore
from headrace.store.part import PartId, PartRange
from headrace.store.save import Pack, Save, SaveSpec
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.throttled import ThrottledTier
from headrace.store.tiers.tier import Tier

if TYPE_CHECKING:
    from headrace.engine.core import Engine

#: The bound on the request's time over the longer of load and compute.
BOUND = 1.15
_UNTHROTTLED = 100e9
_TRIES = 3
_TIER = "memory:2GiB"
_FLUSH_S = 60.0
_SPARE_PAGES = 2


@dataclass
class Trace:
    """When layers came and went during a request: seconds on `time.perf_counter`'s clock, by layer.

    Attributes:
        arrived: when the last record of the layer was in the pool.
        attended: when the layer's attention was computed, and its new KV offered to be saved.
    """

    arrived: dict[int, float] = field(default_factory=dict)
    attended: dict[int, float] = field(default_factory=dict)


class TracedStore(KVStore):
    """A store that notes when layers come and go."""

    trace: Trace = Trace()

    def load_batch(self, loads: Sequence[tuple[Sequence[FoundChunk], PartRange, Deliver]]) -> Sequence[Load]:
        """See `KVStore.load_batch`."""
        return super().load_batch([(chunks, wanted, self.noting(deliver)) for chunks, wanted, deliver in loads])

    def save(self, spec: SaveSpec, pack: Pack) -> Save | None:
        """See `KVStore.save`."""
        save = super().save(spec, pack)
        return None if save is None else _TracedSave(save, self)

    def noting(self, deliver: Deliver) -> Deliver:
        """The same, and the arrival goes into the trace."""
        assert isinstance(deliver, NativeDeliver)
        return _Noting(deliver, self.trace)


class _Noting:
    def __init__(self, deliver: NativeDeliver, trace: Trace) -> None:
        self._deliver = deliver
        self._trace = trace
        self.copy = deliver.copy

    def __call__(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
        self._deliver(chunk, part, first, last, records)
        self._note(first, last)

    def arrived(self, chunk: int, part: PartId, first: int, last: int) -> None:
        self._deliver.arrived(chunk, part, first, last)
        self._note(first, last)

    def _note(self, first: int, last: int) -> None:
        self._trace.arrived.update(dict.fromkeys(range(first, last), time.perf_counter()))


class _TracedSave:
    def __init__(self, save: Save, store: TracedStore) -> None:
        self._save = save
        self._store = store

    @property
    def packed(self) -> bool:
        return self._save.packed

    def layer_ready(self, layer: int) -> None:
        self._store.trace.attended[layer] = time.perf_counter()
        self._save.layer_ready(layer)

    def cancel(self) -> None:
        self._save.cancel()


@dataclass(frozen=True)
class Timed:
    """A request, or a load: how long it took, and when each layer came (and went), seconds from its begin."""

    seconds: float
    arrived: tuple[float, ...] = ()
    attended: tuple[float, ...] = ()


@dataclass(frozen=True)
class Overlap:
    """One round.

    Attributes:
        load: the prefix from the tier, nothing else running.
        compute: the suffix over a prefix that is in the pool, with saving.
        both: the suffix over a prefix that comes from the tier, with saving.
    """

    load: Timed
    compute: Timed
    both: Timed

    @property
    def to_max(self) -> float:
        """Time of both over the longer of the two."""
        return self.both.seconds / max(self.load.seconds, self.compute.seconds)

    @property
    def to_sum(self) -> float:
        """Time of both over the sum of the two."""
        return self.both.seconds / (self.load.seconds + self.compute.seconds)


@dataclass(frozen=True)
class Overlaps:
    """All rounds, and the bytes of the prefix and the bandwidth that was set."""

    rounds: list[Overlap]
    kv_bytes: int
    bandwidth: float

    def typical(self) -> dict[str, tuple[float, ...]]:
        """Seconds at which each layer came or was attended to, in the round of the median ratio."""
        chosen = sorted(self.rounds, key=lambda r: r.to_max)[len(self.rounds) // 2]
        return {
            "load alone": chosen.load.arrived,
            "compute alone": chosen.compute.attended,
            "load beside compute": chosen.both.arrived,
            "compute behind load": chosen.both.attended,
        }

    def summary(self) -> dict[str, Any]:
        """Medians over the rounds."""
        rounds = self.rounds
        return {
            "both_s": round(median(r.both.seconds for r in rounds), 4),
            "load_s": round(median(r.load.seconds for r in rounds), 4),
            "compute_s": round(median(r.compute.seconds for r in rounds), 4),
            "ratio_to_max": round(median(r.to_max for r in rounds), 4),
            "ratio_to_sum": round(median(r.to_sum for r in rounds), 4),
            "bound": BOUND,
            "kv_bytes": self.kv_bytes,
            "bandwidth_gb_per_s": round(self.bandwidth / 1e9, 4),
            "rounds": len(rounds),
            "each": [[round(t.seconds, 4) for t in (r.load, r.compute, r.both)] for r in rounds],
        }


def measure(config: EngineConfig, prefix_chunks: int = 16, suffix_tokens: int = 512, rounds: int = 7) -> Overlaps:
    """Two prefixes are stored; in turn one comes from the tier below a new suffix, and the other leaves the pool.

    Args:
        config: of the engine; `tier` may name one tier to throttle (default: memory).
        prefix_chunks: chunks of a prefix.
        suffix_tokens: new tokens behind it.
        rounds: repetitions.

    Raises:
        ConfigError: more than one tier is given, or the pool cannot be had.
        HeadraceError: KV did not come from where it should.
    """
    prefix_tokens = prefix_chunks * config.store.chunk_tokens
    with _Bench(config, prefix_tokens, suffix_tokens) as bench, progress("layer pipeline", rounds) as advance:
        bench.prepare()
        results = []
        for number in range(rounds):
            here, other = number % 2, 1 - number % 2
            both = bench.ask(here, source="tier")
            compute = bench.ask(here, source="pool")
            results.append(Overlap(bench.load(other), compute, both))
            advance(1)
        return Overlaps(results, bench.kv_bytes, bench.bandwidth)


class _Bench:
    """An engine over a throttled tier, and two stored prefixes of which the pool holds one.

    Args:
        config: of the engine.
        prefix_tokens: whole chunks.
        suffix_tokens: computed in one step.
    """

    bandwidth = _UNTHROTTLED
    _store: TracedStore

    def __init__(self, config: EngineConfig, prefix_tokens: int, suffix_tokens: int) -> None:
        if len(config.store.tier) > 1:
            raise ConfigError(f"--tier: {' '.join(config.store.tier)} are several; give the one to throttle")
        self._prefix_tokens, self._suffix_tokens = prefix_tokens, suffix_tokens
        budget = max(config.scheduler.max_num_batched_tokens, suffix_tokens)
        config = with_scheduler(config, max_num_batched_tokens=budget)
        self._config = replace(config, store=replace(config.store, store=True, replication="all", recompute=False))
        self._asked = 0
        self._stack = ExitStack()

    def __enter__(self) -> "_Bench":
        with ExitStack() as stack:
            inner = stack.enter_context(scratch_tiers(self._config.store.tier or (_TIER,)))[0]
            self._engine = self._open(inner)
            stack.callback(self._close)
            self._stack = stack.pop_all()
        self._copier = RowCopier(self._store.layout)
        stream = random_prompts(self._engine.info.vocab_size, [2 * self._prefix_tokens], 1, seed=5)[0].prompt
        self._prefixes = stream[: self._prefix_tokens], stream[self._prefix_tokens :]
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def prepare(self) -> None:
        """Store both prefixes, and set the bandwidth at which one loads for as long as its suffix computes."""
        for prefix in self._prefixes:
            self._run(prefix)
            if not self._store.flush(_FLUSH_S):
                raise HeadraceError(f"the tier did not take the prefix within {_FLUSH_S:.0f} s")
        info = self._engine.info
        pages = -(-(self._prefix_tokens + self._suffix_tokens + 1) // info.page_size)  # one prefix, but not two
        self._engine.resize_kv((pages + _SPARE_PAGES) * info.kv_bytes // info.pages)
        self.load(0)  # reading threads and buffers are there
        for number in (0, 1):
            self.ask(number, source=None)  # what was left in the pool of the one goes for the other
        seconds = median(self.ask(1, source="pool").seconds for _ in range(_TRIES))
        self.bandwidth = self.kv_bytes / seconds

    @property
    def kv_bytes(self) -> int:
        """Bytes that the tier gives for a prefix."""
        chunks = self._prefix_tokens // self._config.store.chunk_tokens
        return chunks * chunk_bytes(self._store.layout)

    def ask(self, number: int, source: Literal["pool", "tier"] | None) -> Timed:
        """A prefix with a new suffix, to its first token.

        Args:
            number: of the prefix.
            source: where its KV must come from; None: wherever it is.
        """
        before = self._engine.stats().hit_tokens_by_source
        suffix = random_prompts(self._engine.info.vocab_size, [self._suffix_tokens], 1, seed=100 + self._asked)
        timed = self._run(self._prefixes[number] + suffix[0].prompt)
        after = self._engine.stats().hit_tokens_by_source
        name = "pool" if source == "pool" else self._store.tiers[0].name
        found = {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}
        # A page or two of it may have outlasted the other prefix in the pool.
        page_tokens = self._engine.info.page_size
        if source is not None and found.get(name, 0) < self._prefix_tokens - _SPARE_PAGES * page_tokens:
            raise HeadraceError(f"the prefix of {self._prefix_tokens} tokens should come from {name}, came: {found}")
        # The next request must find the tier idle: what this one saved is written.
        if not self._store.flush(_FLUSH_S):
            raise HeadraceError(f"the tier did not take the suffix within {_FLUSH_S:.0f} s")
        return timed

    def load(self, number: int) -> Timed:
        """A prefix from the tier into memory, and nothing else."""
        store, area = self._store, whole(self._store.layout)
        trace = store.trace = Trace()
        begun = time.perf_counter()
        found = store.lookup(store.keys(np.array(self._prefixes[number], np.int32)), area, count=False)
        store.load(found, area, store.noting(self._copier)).wait_all()
        seconds = time.perf_counter() - begun
        return Timed(seconds, _since(begun, trace.arrived))

    def _run(self, prompt: list[int]) -> Timed:
        self._asked += 1
        trace = self._store.trace = Trace()
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        begun = time.perf_counter()
        self._engine.add(Request(id=f"r{self._asked}", prompt=prompt, params=params))
        deltas: list[Delta] = []
        while not self._engine.idle:
            deltas += self._engine.step()
        seconds = time.perf_counter() - begun
        if not deltas or deltas[-1].finish == "error":
            raise HeadraceError(f"the request failed: {deltas[-1].error if deltas else 'no output'}")
        return Timed(seconds, _since(begun, trace.arrived), _since(begun, trace.attended))

    def _open(self, inner: Tier) -> "Engine":
        from headrace.engine.build import build
        from headrace.engine.core import Engine

        def open_it(settings: StoreConfig, layout: KVLayout) -> OpenedStore:
            tier = ThrottledTier(inner, lambda at: self.bandwidth)
            self._store = TracedStore(layout, [tier], StoreSettings.of(settings))
            return OpenedStore(self._store, f"{tier.name}, throttled")

        return Engine(self._config, build(self._config, None, open_it))

    def _close(self) -> None:
        self.bandwidth = _UNTHROTTLED
        self._engine.close()


def _since(begun: float, times: dict[int, float]) -> tuple[float, ...]:
    return tuple(times[layer] - begun for layer in sorted(times))
