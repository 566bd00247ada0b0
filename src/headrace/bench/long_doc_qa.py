"""Questions about long documents whose KV lies in storage tiers: how policies of the store compare, step by step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headrace.bench.local_engine import LocalEngine, warm_up, with_cache
from headrace.bench.long_doc_prompts import Window, new_prompts, question_batch
from headrace.bench.progress import progress
from headrace.bench.workload import Item, items
from headrace.core.config import EngineConfig, StoreConfig
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.settings import format_size
from headrace.store.layout import KVLayout
from headrace.store.opening import OpenedStore, open_store
from headrace.store.part import PartRange
from headrace.store.store import KVStore


@dataclass(frozen=True)
class Policy:
    """A step of the ablation: tiers in use, and what differs from the one before.

    Attributes:
        tiers: how many, the fastest first.
        settings: of the store.
    """

    tiers: int
    settings: dict[str, Any]


_BLOCKING = {"load_overlap": False, "recompute": False}

#: From request by request as LMCache does to the full design, one change after the other.
POLICIES = {
    "sequential": Policy(1, {"read_policy": "sequential", "deferred_writes": False, **_BLOCKING}),
    "batched": Policy(1, {"read_policy": "completion", "deferred_writes": False, **_BLOCKING}),
    "deferred": Policy(1, {"read_policy": "completion", **_BLOCKING}),
    "static": Policy(2, {"read_policy": "static", **_BLOCKING}),
    "completion": Policy(2, {"read_policy": "completion", **_BLOCKING}),
    "overlap": Policy(2, {"read_policy": "completion", "recompute": False}),
    "recompute": Policy(2, {"read_policy": "completion"}),
}
BASELINE = "sequential"

_SAVE_ATTEMPTS, _FLUSH_SECONDS = 8, 120.0


@dataclass(frozen=True)
class Speeds:
    """What tiers are throttled to, bytes per second; 0: not at all."""

    fast: float = 0.0
    slow: float = 0.0


@dataclass(frozen=True)
class Workload:
    """What is asked.

    Attributes:
        windows: of documents, all of which lie in both tiers.
        new: prompts per run that nobody asked before.
        new_tokens: tokens of each.
        max_tokens: of each answer.
    """

    windows: Sequence[Window]
    new: int
    new_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class QARun:
    """One policy answering all questions.

    Attributes:
        wall_s: from the first request in to the last token out.
        tokens: of prompts and outputs.
        read_s: time with a read in flight, of the tier that was read longest.
        compute_s: time in forward passes, without waiting for KV.
        read_bytes, written_bytes: of all tiers.
        by_source: prompt tokens by where their KV came from.
        computed_tokens: the rest.
        outputs: token ids by custom_id, but of new prompts.
    """

    wall_s: float
    tokens: int
    read_s: float
    compute_s: float
    read_bytes: int
    written_bytes: int
    by_source: dict[str, int]
    computed_tokens: int
    outputs: dict[str, list[int]]

    @property
    def overlap_s(self) -> float:
        """Time that was spent in both."""
        return max(0.0, self.read_s + self.compute_s - self.wall_s)

    @property
    def read_share(self) -> float:
        """Time reading as a share of the whole."""
        return self.read_s / self.wall_s


class LongDocQA:
    """Windows filled into tiers once, and policies that answer questions from there.

    Args:
        config: of the engine; tiers are made here. A KV pool of 0 bytes becomes one for `pool_windows` windows.
        folder: where the tiers lie; what is there from an earlier run is used again.
        workload: what is asked.
        pool_windows: see above.
    """

    def __init__(self, config: EngineConfig, folder: Path, workload: Workload, pool_windows: float) -> None:
        self._work = workload
        self._folder = folder
        self._runs = 0
        self._config = config
        self._keys: set[bytes] = set()
        longest = max(
            len(window.tokens) + max(map(len, window.questions)) + workload.max_tokens for window in workload.windows
        )
        engine = LocalEngine(replace(config, store=replace(config.store, store=False)))
        info = engine.info
        token_bytes = info.kv_bytes // (info.pages * info.page_size)
        if not config.cache.kv_memory:
            pages = -(-int(pool_windows * longest) // info.page_size)
            self._config = with_cache(config, kv_memory=pages * info.page_size * token_bytes)
        self.pool_bytes = self._config.cache.kv_memory
        self.bytes = token_bytes * sum(len(window.tokens) for window in workload.windows)
        if self.bytes < 2 * self.pool_bytes:
            raise ConfigError(
                f"{format_size(self.bytes)} of documents are less than twice the KV pool of "
                f"{format_size(self.pool_bytes)}; give more --windows or less --kv-memory"
            )
        per_run = workload.new * workload.new_tokens * token_bytes
        self._capacity = int(1.1 * self.bytes) + 2 * per_run + (64 << 20)
        self._vocab_size = info.vocab_size

    def fill(self) -> float:
        """Compute the windows that do not lie in both tiers yet, and save them; returns the seconds it took."""
        begun = time.perf_counter()
        engine, store = self._engine(Policy(2, {"deferred_writes": False}), Speeds())
        try:
            missing = [window for window in self._work.windows if not self._stored(store, window)]
            with progress("computing documents", len(missing)) as advance:
                for window in missing:
                    self._save(engine, store, window)
                    advance(1)
        finally:
            engine.engine.close(60.0)
        return time.perf_counter() - begun

    def run(self, policy: Policy, speeds: Speeds) -> QARun:
        """Answer all questions once, with an engine of its own; what was saved meanwhile is deleted after."""
        self._runs += 1
        work = self._work
        new = new_prompts(work.new, work.new_tokens, self._vocab_size, f"{self._runs}-{time.time_ns()}")
        batch = question_batch(work.windows, new, work.max_tokens)
        known = [item for item in batch if item.prompt not in new]
        engine, store = self._engine(policy, speeds)
        try:
            warm_up(engine, [Item("short", known[0].prompt[:40], known[0].params)])
            before, stats_before = store.stats(), engine.stats()
            run = engine.run(batch)
            after, stats = store.stats(), engine.stats()
            waited = stats.load_wait_seconds_total - stats_before.load_wait_seconds_total
            result = QARun(
                wall_s=run.wall_s,
                tokens=run.prompt_tokens + run.output_tokens,
                read_s=max(now.read_seconds - then.read_seconds for now, then in zip(after.tiers, before.tiers)),
                compute_s=run.step_seconds - waited,
                read_bytes=sum(now.read_bytes - then.read_bytes for now, then in zip(after.tiers, before.tiers)),
                written_bytes=after.written_bytes - before.written_bytes,
                by_source={
                    name: count - stats_before.hit_tokens_by_source.get(name, 0)
                    for name, count in stats.hit_tokens_by_source.items()
                },
                computed_tokens=run.prompt_tokens - run.hit_tokens,
                outputs={item.custom_id: run.outputs[item.custom_id] for item in known},
            )
            store.flush(60.0)
            self._delete_new(store)
        finally:
            engine.engine.close(60.0)
        return result

    def _engine(self, policy: Policy, speeds: Speeds) -> tuple[LocalEngine, KVStore]:
        opened: list[KVStore] = []

        def opening(config: StoreConfig, layout: KVLayout) -> OpenedStore | None:
            made = open_store(config, layout)
            if made is not None:
                opened.append(made.store)
            return made

        tiers = tuple(
            f"{f'throttled:{int(rate)}B/s:' if rate else ''}dir:{self._folder / name}:{self._capacity >> 20}MiB"
            for name, rate in (("fast", speeds.fast), ("slow", speeds.slow))
        )[: policy.tiers]
        own = {"tier": tiers, "replication": "all", "store": True, "store_ttl": 0.0, **policy.settings}
        engine = LocalEngine(replace(self._config, store=replace(self._config.store, **own)), open_the_store=opening)
        return engine, opened[0]

    def _save(self, engine: LocalEngine, store: KVStore, window: Window) -> None:
        """Bring a window into both tiers; what a full queue refused is offered again from the pool."""
        for _ in range(_SAVE_ATTEMPTS):
            engine.run(items([(window.tokens, 1)]))
            if not store.flush(_FLUSH_SECONDS):
                raise HeadraceError(f"{self._folder} does not take a document within {_FLUSH_SECONDS:g} s")
            if self._stored(store, window):
                return
        raise HeadraceError(f"a document does not reach both tiers; is {self._folder} full?")

    def _stored(self, store: KVStore, window: Window) -> bool:
        """True when all full chunks of a window lie in all tiers; remembers their keys."""
        layout = store.layout
        keys = store.keys(np.array(window.tokens, np.int32))
        self._keys.update(keys)
        found = store.lookup(keys, PartRange(0, layout.layers, 0, layout.kv_heads), count=False)
        every = tuple(range(len(store.tiers)))
        return len(found) == len(keys) and all(part.tiers == every for chunk in found for part in chunk.parts)

    def _delete_new(self, store: KVStore) -> None:
        for tier in store.tiers:
            for scanned in list(tier.scan()):
                if scanned.part.key not in self._keys:
                    tier.delete(scanned.part)


@dataclass(frozen=True)
class Ablation:
    """Runs of each policy, in turn.

    Attributes:
        runs: by policy.
        speeds: of the tiers.
        bytes, pool_bytes: of the documents and of the pool.
    """

    runs: dict[str, list[QARun]]
    speeds: Speeds
    bytes: int
    pool_bytes: int

    def rate(self, policy: str) -> float:
        """Tokens per second: the median over rounds."""
        return median(run.tokens / run.wall_s for run in self.runs[policy])

    def summary(self) -> dict[str, Any]:
        """Medians as one object; ratios are of rounds of the same number."""
        first = next(iter(self.runs))
        expected = self.runs[first][0].outputs
        policies = {}
        for name, runs in self.runs.items():
            ratios = [theirs.wall_s / run.wall_s for run, theirs in zip(runs, self.runs[first])]
            policies[name] = {
                "total_tokens_per_s": round(self.rate(name), 1),
                f"over_{first}": round(median(ratios), 3),
                "wall_s": round(median(run.wall_s for run in runs), 2),
                "read_s": round(median(run.read_s for run in runs), 2),
                "compute_s": round(median(run.compute_s for run in runs), 2),
                "overlap_s": round(median(run.overlap_s for run in runs), 2),
                "read_share": round(median(run.read_share for run in runs), 3),
                "read_mb": round(runs[-1].read_bytes / 1e6),
                "written_mb": round(runs[-1].written_bytes / 1e6),
                "computed_tokens": runs[-1].computed_tokens,
                "differing_outputs": sum(run.outputs[item] != expected[item] for run in runs for item in expected),
            }
        last = list(self.runs)[-1]
        return {
            "speedup": policies[last][f"over_{first}"],
            "of": f"{last} over {first}",
            f"{first}_read_share": policies[first]["read_share"],
            "fast_mb_per_s": round(self.speeds.fast / 1e6, 1),
            "slow_mb_per_s": round(self.speeds.slow / 1e6, 1),
            "questions": len(expected),
            "documents_mb": round(self.bytes / 1e6),
            "pool_mb": round(self.pool_bytes / 1e6),
            "rounds": len(self.runs[first]),
            "policies": policies,
        }


def speeds_for(bench: LongDocQA, share: float, ratio: float) -> Speeds:
    """Rates at which request by request reads from the faster tier take a share of the time.

    Args:
        bench: filled.
        share: of the time, 0..1.
        ratio: of the faster tier's rate to the slower one's.
    """
    run = bench.run(POLICIES[BASELINE], Speeds())
    rest = run.wall_s - run.read_s
    fast = run.read_bytes * (1 - share) / (share * rest)
    return Speeds(fast, fast / ratio)


def compare(bench: LongDocQA, policies: Sequence[str], speeds: Speeds, rounds: int) -> Ablation:
    """Run policies in turn, `rounds` times; at least the first and the last are compared."""
    runs: dict[str, list[QARun]] = {name: [] for name in policies}
    with progress("policies", rounds * len(policies)) as advance:
        for _ in range(rounds):
            for name in policies:
                runs[name].append(bench.run(POLICIES[name], speeds))
                advance(1)
    return Ablation(runs, speeds, bench.bytes, bench.pool_bytes)
