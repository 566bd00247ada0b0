"""Bursts of requests whose prefixes lie in slow tiers: the store's reads against reading request by request from one.

Two policies serve the same requests at the same times. `sequential` has one tier, the first, reads one request's prefix
after the other, and computes when it has come (the way of LMCache); `ours` has all tiers, shares the reads of all
requests between them as they finish, and computes meanwhile. The rates of arrival are shares of the rate at which
`sequential` serves requests when all of them wait already.

The prefixes together are much larger than the pool, suffixes and answers are short: what is measured is retrieving.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from headrace.bench.arrivals import gamma_arrivals
from headrace.bench.local_engine import LocalEngine
from headrace.bench.progress import Advance, progress
from headrace.bench.workload import Item, items
from headrace.core.config import EngineConfig, StoreConfig
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.request import Request
from headrace.store.layout import KVLayout
from headrace.store.opening import OpenedStore
from headrace.store.part import PartRange
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.spec import Throttle
from headrace.store.tiers.throttled import ThrottledTier
from headrace.store.tiers.tier import Tier

Policy = Literal["sequential", "ours"]
#: A small model whose KV is large for what it computes: 8 KiB a token.
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_FLUSH_SECONDS = 60.0
#: Of the answers' TTFT at one rate, the part that a rate of the other policy must keep below.
_PERCENT = 90


@dataclass(frozen=True)
class SlowTier:
    """A tier that holds the prefixes, and how slow it is while they are read (None: as it is)."""

    tier: Tier
    throttle: Throttle | None

    def opened(self) -> Tier:
        """The tier for one run."""
        how = self.throttle
        if how is None:
            return self.tier
        return ThrottledTier(self.tier, how.bandwidth, how.latency, how.depth, how.write)


@dataclass(frozen=True)
class Served:
    """One run over all requests.

    Attributes:
        arrivals: when each request came, seconds from the start.
        ttft: seconds from then to its first token, in the same order.
        backlog: requests in the system, as each one came (itself included).
        duration: from the start to the last token.
        hit_tokens: prompt tokens by where they came from.
        load_wait: seconds that forward passes stood still for stored KV.
        step_seconds: seconds of forward passes, those included.
        outputs: tokens by request.
    """

    arrivals: list[float]
    ttft: list[float]
    backlog: list[int]
    duration: float
    hit_tokens: dict[str, int]
    load_wait: float
    step_seconds: float
    outputs: dict[str, list[int]]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.ttft) / self.duration

    @property
    def mean(self) -> float:
        """Mean TTFT."""
        return float(np.mean(self.ttft))

    @property
    def p90(self) -> float:
        """90th percentile of TTFT."""
        return float(np.percentile(self.ttft, _PERCENT))

    def summary(self) -> dict[str, Any]:
        """In numbers. Arrivals come twice alike: a backlog that does not grow is about as long in the second half as in
        the first, gets empty time and again, and is soon worked off after the last arrival."""
        half = len(self.backlog) // 2
        last_empty = max((i for i, waiting in enumerate(self.backlog) if waiting == 1), default=0)
        return {
            "ttft_mean_s": round(self.mean, 4),
            "ttft_p50_s": round(float(np.median(self.ttft)), 4),
            "ttft_p90_s": round(self.p90, 4),
            "requests_per_s": round(self.rate, 3),
            "backlog_first_half": round(float(np.mean(self.backlog[:half])), 2),
            "backlog_second_half": round(float(np.mean(self.backlog[half:])), 2),
            "backlog_as_second_half_begins": self.backlog[half] - 1,
            "backlog_most": max(self.backlog),
            "found_empty": sum(waiting == 1 for waiting in self.backlog),
            "last_found_empty_at": round(last_empty / max(1, len(self.backlog) - 1), 3),
            "after_last_arrival_s": round(self.duration - self.arrivals[-1], 3),
            "load_wait_share": round(self.load_wait / self.duration, 4),
            "step_share": round(self.step_seconds / self.duration, 4),
            "hit_tokens": self.hit_tokens,
        }


@dataclass(frozen=True)
class Bursty:
    """Both policies over the load.

    Attributes:
        saturation: requests per second of `sequential` with all requests waiting; and of `ours`.
        runs: by policy and load, a share of the saturation of `sequential`.
    """

    saturation: dict[Policy, float]
    runs: dict[Policy, dict[float, Served]]

    def goodput(self, load: float) -> float:
        """How much more load `ours` carries at the TTFT p90 that `sequential` has at `load`.

        Between measured loads the p90 is interpolated; beyond the highest one nothing is claimed.
        """
        bound = self.runs["sequential"][load].p90
        loads = sorted(self.runs["ours"])
        tails = np.maximum.accumulate([self.runs["ours"][one].p90 for one in loads])
        best = 0.0
        for place, (one, tail) in enumerate(zip(loads, tails)):
            if tail <= bound:
                best = one
            elif place and tails[place - 1] <= bound:
                best += (one - loads[place - 1]) * (bound - tails[place - 1]) / (tail - tails[place - 1])
        return best / load

    def summary(self) -> dict[str, Any]:
        """Ratios at the loads that both policies served, and every run."""
        both = [load for load in self.runs["sequential"] if load in self.runs["ours"]]
        reference = self.runs["sequential"]
        outputs = [run.outputs for runs in self.runs.values() for run in runs.values()]
        return {
            "saturation_per_s": {name: round(rate, 3) for name, rate in self.saturation.items()},
            "ttft_mean_ratio": {
                str(load): round(reference[load].mean / self.runs["ours"][load].mean, 3) for load in both
            },
            "goodput_ratio_at_equal_p90": {str(load): round(self.goodput(load), 3) for load in both},
            "outputs_equal": all(one == outputs[0] for one in outputs),
            "runs": {
                policy: {str(load): run.summary() for load, run in runs.items()} for policy, runs in self.runs.items()
            },
        }


def requests(count: int, prefixes: int, prefix_tokens: int, suffix_tokens: int, outputs: int, vocabulary: int,
             seed: int = 0) -> tuple[list[Item], list[Item]]:  # fmt: skip
    """Requests that each begin with one of the prefixes, any of them as likely; and the prefixes by themselves."""
    rng = np.random.default_rng(seed)

    def tokens(length: int) -> list[int]:
        return [int(token) for token in rng.integers(3, vocabulary, length)]

    heads = [tokens(prefix_tokens) for _ in range(prefixes)]
    chosen = rng.integers(0, prefixes, count)
    batch = items([(heads[which] + tokens(suffix_tokens), outputs) for which in chosen])
    # A token more: the last one is always computed, so the last chunk would otherwise not be asked for.
    return batch, items([([*head, 3], 1) for head in heads])


def fill(config: EngineConfig, tiers: Sequence[SlowTier], heads: Sequence[Item]) -> None:
    """Compute the prefixes and put their KV on every tier, at the tiers' own speed.

    Raises:
        ConfigError: a tier does not hold all of it.
    """
    opened: list[KVStore] = []

    def open_it(config: StoreConfig, layout: KVLayout) -> OpenedStore:
        opened.append(KVStore(layout, [slow.tier for slow in tiers], StoreSettings(replication="all")))
        return OpenedStore(opened[0], "filling")

    local = LocalEngine(config, open_the_store=open_it)
    store = opened[0]
    try:
        with progress("prefixes", len(heads)) as advance:
            for item in heads:
                local.run([item], advance=advance)
                if not store.flush(_FLUSH_SECONDS):
                    raise HeadraceError(f"the tiers did not take a prefix within {_FLUSH_SECONDS:g} s")
        whole = PartRange(0, store.layout.layers, 0, store.layout.kv_heads)
        for item in heads:
            keys = store.keys(np.array(item.prompt, np.int32))
            found = store.lookup(keys, whole, count=False)
            if len(found) < len(keys) or any(len(part.tiers) < len(tiers) for one in found for part in one.parts):
                raise ConfigError("the prefixes do not all lie on every tier; make the tiers larger")
    finally:
        local.engine.close()


def serve(config: EngineConfig, policy: Policy, tiers: Sequence[SlowTier], batch: Sequence[Item],
          arrivals: Sequence[float], advance: Advance) -> Served:  # fmt: skip
    """Serve requests as they arrive, by an engine with an empty pool."""
    used = tiers[:1] if policy == "sequential" else tiers
    settings = StoreSettings(read_policy="sequential" if policy == "sequential" else "completion")

    def open_it(config: StoreConfig, layout: KVLayout) -> OpenedStore:
        return OpenedStore(KVStore(layout, [slow.opened() for slow in used], settings), policy)

    own = replace(config, store=replace(config.store, load_overlap=policy == "ours"))
    local = LocalEngine(own, open_the_store=open_it)
    try:
        return _drive(local, [item.request() for item in batch], arrivals, advance)
    finally:
        local.engine.close()


def _drive(local: LocalEngine, waiting: list[Request], arrivals: Sequence[float], advance: Advance) -> Served:
    engine, alarm, clock = local.engine, threading.Event(), time.perf_counter
    outputs: dict[str, list[int]] = {request.id: [] for request in waiting}
    first: dict[str, float] = {}
    backlog: list[int] = []
    sent = flying = 0
    start = clock()
    while sent < len(waiting) or flying:
        while sent < len(waiting) and arrivals[sent] <= clock() - start:
            engine.add(waiting[sent])
            sent, flying = sent + 1, flying + 1
            backlog.append(flying)
        if not flying:
            alarm.wait(max(0.0, arrivals[sent] - (clock() - start)))  # nobody sets it: there is nothing to do till then
            continue
        for delta in engine.step():
            if delta.finish == "error":
                raise HeadraceError(f"request {delta.request} failed: {delta.error}")
            if delta.tokens:
                first.setdefault(delta.request, clock() - start)
                outputs[delta.request] += delta.tokens
            if delta.finish is not None:
                flying -= 1
                advance(1)
    duration, stats = clock() - start, engine.stats()
    ttft = [first[request.id] - due for request, due in zip(waiting, arrivals)]
    return Served(
        list(arrivals),
        ttft,
        backlog,
        duration,
        {**stats.hit_tokens_by_source, "computed": stats.computed_tokens_total},
        stats.load_wait_seconds_total,
        stats.step_seconds_total,
        outputs,
    )


def schedule(count: int, rate: float, cv: float, seed: int) -> list[float]:
    """Gamma arrivals of exactly the given mean rate and of the same shape at every rate, the second half as the first.

    A few hundred gaps with a coefficient of variation of 4 differ by a fifth from the mean they were drawn with; here
    they are stretched to it, so that a share of a saturation is that share. Both halves begin behind their longest gap:
    a backlog that is gone by then comes and goes, but does not grow.
    """
    gaps = np.diff(gamma_arrivals(count // 2 + 1, 1.0, cv, seed))
    gaps = np.roll(gaps, -1 - int(gaps.argmax())) / (gaps.mean() * rate)
    return [0.0, *(float(time) for time in np.cumsum(np.resize(gaps, count - 1)))]


def measure(
    config: EngineConfig,
    tiers: Sequence[SlowTier],
    batch: Sequence[Item],
    heads: Sequence[Item],
    loads: dict[Policy, Sequence[float]],
    cv: float = 4.0,
    seed: int = 0,
) -> Bursty:
    """Fill the tiers, find what each policy serves at most, then serve the same arrivals with each, load by load."""
    limits = replace(config.scheduler, max_queue=max(len(batch), config.scheduler.max_queue))
    config = replace(config, scheduler=limits)
    fill(config, tiers, heads)
    saturation: dict[Policy, float] = {}
    runs: dict[Policy, dict[float, Served]] = {"sequential": {}, "ours": {}}
    with progress("requests", len(batch) * (2 + sum(map(len, loads.values())))) as advance:
        for policy in runs:
            saturation[policy] = serve(config, policy, tiers, batch, [0.0] * len(batch), advance).rate
        for load in sorted({load for several in loads.values() for load in several}):
            times = schedule(len(batch), load * saturation["sequential"], cv, seed)
            for policy, some in runs.items():
                if load in loads[policy]:
                    some[load] = serve(config, policy, tiers, batch, times, advance)
    return Bursty(saturation, runs)
