"""What the store costs where little is reused: engines side by side, in turn on the same blocks of requests.

One engine has no store (`off`), one saves every chunk to one tier (`one`), one leaves it to the policy (`auto`); each
has its own tiers and its own pool. All live in this process and take turns block by block, so that noise of the machine
hits all alike. What a block has left to be written is written before its CPU time is taken.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headrace.bench.local_engine import LocalEngine
from headrace.bench.progress import progress
from headrace.bench.ratio import ratio_of
from headrace.bench.store_chunks import scratch_tiers
from headrace.bench.workload import Item, items
from headrace.core.config import EngineConfig, StoreConfig
from headrace.core.errors import HeadraceError
from headrace.store.layout import KVLayout
from headrace.store.opening import OpenedStore
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore

LANES = ("off", "one", "auto")
#: Tokens of a prefix that is used again, and how many requests before it may first have been used.
PREFIX, RECENT = 512, 100
_FLUSH_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        warm: requests before the measured ones: what the policy may learn from.
        pairs: measured blocks.
        block: requests of each.
        clients: requests in flight.
    """

    warm: int = 200
    pairs: int = 9
    block: int = 12
    clients: int = 4


@dataclass(frozen=True)
class BlockRun:
    """One block on one engine.

    Attributes:
        ttft: mean time to first token, seconds.
        wall: from the first request in to the last token out, seconds.
        cpu: process CPU seconds, those of the deferred writes included.
        written: bytes written to all tiers.
        hit_tokens: prompt tokens that were not computed.
        outputs: tokens by request.
    """

    ttft: float
    wall: float
    cpu: float
    written: int
    hit_tokens: int
    outputs: dict[str, list[int]]


class Lane:
    """An engine and its store, if it has one.

    Args:
        name: one of `LANES`.
        config: of the engine; its store settings are the lane's.
        tiers: texts of its tiers.
        stack: closes what it opens.
    """

    def __init__(self, name: str, config: EngineConfig, tiers: Sequence[str], stack: ExitStack) -> None:
        self.name = name
        self.store: KVStore | None = None
        built = stack.enter_context(scratch_tiers(tiers)) if name != "off" else []

        def open_it(config: StoreConfig, layout: KVLayout) -> OpenedStore | None:
            if not built:
                return None
            self.store = KVStore(layout, built, StoreSettings.of(config))
            return OpenedStore(self.store, name)

        replication = "one" if name == "one" else config.store.replication
        self.local = LocalEngine(
            replace(config, store=replace(config.store, store=name != "off", replication=replication)),
            open_the_store=open_it,
        )
        stack.callback(self.local.engine.close)

    @property
    def written(self) -> int:
        """Bytes written to all tiers so far."""
        return self.store.stats().written_bytes if self.store is not None else 0

    def run(self, batch: Sequence[Item], clients: int) -> BlockRun:
        """Run requests, so many at a time.

        Raises:
            HeadraceError: a request failed, or its KV was not written in a minute.
        """
        engine, waiting = self.local.engine, [item.request() for item in reversed(batch)]
        outputs: dict[str, list[int]] = {item.custom_id: [] for item in batch}
        begun: dict[str, float] = {}
        first: dict[str, float] = {}
        flying, hits, written = 0, engine.stats().hit_tokens_total, self.written
        clock, cpu, start = time.perf_counter, time.process_time(), time.perf_counter()
        while waiting or flying:
            while waiting and flying < clients:
                request = msgspec.structs.replace(waiting.pop(), service="online")
                begun[request.id] = clock()
                engine.add(request)
                flying += 1
            for delta in engine.step():
                if delta.finish == "error":
                    raise HeadraceError(f"request {delta.request} failed: {delta.error}")
                if delta.tokens:
                    first.setdefault(delta.request, clock())
                    outputs[delta.request] += delta.tokens
                flying -= delta.finish is not None
        wall = clock() - start
        if self.store is not None and not self.store.flush(_FLUSH_SECONDS):
            raise HeadraceError(f"the tiers did not take a block's KV within {_FLUSH_SECONDS:g} s")
        cpu = time.process_time() - cpu
        ttft = sum(first[name] - begun[name] for name in begun) / len(batch)
        hit_tokens = engine.stats().hit_tokens_total - hits
        return BlockRun(ttft, wall, cpu, self.written - written, hit_tokens, outputs)


@dataclass(frozen=True)
class Reuse:
    """Blocks of every lane, pair by pair.

    Attributes:
        plan: what was run.
        share: of the measured requests' prompt tokens, those that an earlier request had at the same place.
        prompt_tokens: of the measured requests.
        runs: by lane.
        warm_written: bytes that each lane wrote before.
        stats: of each lane's store at the end, by name.
    """

    plan: Plan
    share: float
    prompt_tokens: int
    runs: dict[str, list[BlockRun]]
    warm_written: dict[str, int]
    stats: dict[str, dict[str, Any]]

    def summary(self) -> dict[str, Any]:
        """Ratios as `[mean, low, high]` with their 95% interval; CPU ratios of the sums."""
        ttft = {name: [run.ttft for run in runs] for name, runs in self.runs.items()}
        wall = {name: [run.wall for run in runs] for name, runs in self.runs.items()}
        cpu = {name: sum(run.cpu for run in runs) for name, runs in self.runs.items()}
        cpus = {name: [run.cpu for run in runs] for name, runs in self.runs.items()}
        off = self.runs["off"]
        requests = self.plan.pairs * self.plan.block
        return {
            "pairs": self.plan.pairs,
            "requests": requests,
            "warm_requests": self.plan.warm,
            "prompt_tokens": self.prompt_tokens,
            "reuse_share": round(self.share, 4),
            "hit_share": {
                name: round(sum(run.hit_tokens for run in runs) / self.prompt_tokens, 4)
                for name, runs in self.runs.items()
            },
            "auto_cpu_over_off": round(cpu["auto"] / cpu["off"], 4),
            "auto_cpu_over_off_interval": ratio_of(cpus["auto"], cpus["off"]).rounded(),
            "auto_ttft_over_off": ratio_of(ttft["auto"], ttft["off"]).rounded(),
            "auto_ttft_over_one": ratio_of(ttft["auto"], ttft["one"]).rounded(),
            "one_cpu_over_off": round(cpu["one"] / cpu["off"], 4),
            "one_cpu_over_off_interval": ratio_of(cpus["one"], cpus["off"]).rounded(),
            "one_wall_over_off": ratio_of(wall["one"], wall["off"]).rounded(),
            "auto_wall_over_off": ratio_of(wall["auto"], wall["off"]).rounded(),
            "written_bytes": {name: sum(run.written for run in runs) for name, runs in self.runs.items()},
            "written_bytes_before": self.warm_written,
            "cpu_s_per_request": {name: round(value / requests, 4) for name, value in cpu.items()},
            "ttft_ms": {name: round(1e3 * sum(values) / len(values), 1) for name, values in ttft.items()},
            "outputs_equal": all(
                run.outputs == plain.outputs for runs in self.runs.values() for run, plain in zip(runs, off)
            ),
            "write_amplification": {name: stats["write_amplification"] for name, stats in self.stats.items()},
            "store": self.stats,
        }


def requests(
    count: int, share: float, shortest: int, longest: int, outputs: int, vocabulary: int = 40000, seed: int = 0
) -> list[Item]:
    """Requests of random tokens whose lengths are spread evenly over the logarithm; some begin as an earlier one did.

    Args:
        count: how many.
        share: of all prompt tokens, those that an earlier request had at the same place.
        shortest, longest: tokens of a prompt.
        outputs: tokens of an answer.
        vocabulary: token ids are below this.
        seed: of everything random.
    """
    stream = random.Random(seed)
    prompts: list[list[int]] = []
    due = 0.0  # tokens that should have been used again by now, less those that were
    for _ in range(count):
        length = round(shortest * (longest / shortest) ** stream.random())
        due += share * length
        earlier = [prompt for prompt in prompts[-RECENT:] if len(prompt) >= PREFIX] if length > PREFIX else []
        head: list[int] = []
        if due >= PREFIX and earlier:
            head = stream.choice(earlier)[:PREFIX]
            due -= PREFIX
        prompts.append([*head, *(stream.randrange(100, vocabulary) for _ in range(length - len(head)))])
    return items([(prompt, outputs) for prompt in prompts])


def shared_share(batch: Sequence[Item], before: Sequence[Item]) -> float:
    """Of a batch's prompt tokens, those in prefixes of `PREFIX` tokens that an earlier request had."""
    seen = {tuple(item.prompt[:PREFIX]) for item in before}
    again = 0
    for item in batch:
        head = tuple(item.prompt[:PREFIX])
        if len(head) == PREFIX and head in seen:
            again += PREFIX
        seen.add(head)
    return again / sum(len(item.prompt) for item in batch)


@contextmanager
def lanes(config: EngineConfig, tiers: Sequence[str]) -> Iterator[dict[str, Lane]]:
    """All engines, and at the end none; the stores go with them."""
    with ExitStack() as stack:
        yield {name: Lane(name, config, tiers, stack) for name in LANES}


def measure(config: EngineConfig, tiers: Sequence[str], batch: Sequence[Item], plan: Plan) -> Reuse:
    """Warm the engines up, then run block after block on each of them, in an order that rotates."""
    warm, rest = batch[: plan.warm], batch[plan.warm :]
    blocks = [rest[i * plan.block : (i + 1) * plan.block] for i in range(plan.pairs)]
    measured = [item for block in blocks for item in block]
    runs: dict[str, list[BlockRun]] = {name: [] for name in LANES}
    with lanes(config, tiers) as engines, progress("blocks", len(LANES) * (plan.pairs + 1)) as advance:
        for name, lane in engines.items():
            # Only the policy learns. Elsewhere what can be used again matters, and without a store what the pool holds.
            lane.run(warm[-{"off": RECENT // 4, "one": RECENT}.get(name, len(warm)) :], plan.clients)
            advance(1)
        before = {name: lane.written for name, lane in engines.items()}
        for number, block in enumerate(blocks):
            for place in range(len(LANES)):
                name = LANES[(number + place) % len(LANES)]
                runs[name].append(engines[name].run(block, plan.clients))
                advance(1)
        stats = {name: lane_stats(lane) for name, lane in engines.items() if lane.store is not None}
    tokens = sum(len(item.prompt) for item in measured)
    return Reuse(plan, shared_share(measured, warm), tokens, runs, before, stats)


def lane_stats(lane: Lane) -> dict[str, Any]:
    """What a lane's store counted."""
    assert lane.store is not None
    stats = lane.store.stats()
    kept = ("saves_offered", "saves_queued", "saves_dropped", "copied_parts", "hit_chunks", "ghost_hits", "decisions")
    return {
        "write_amplification": round(stats.write_amplification, 4),
        **{name: getattr(stats, name) for name in kept},
        "tiers": {tier.name: {"written_bytes": tier.written_bytes, "hits": tier.hits} for tier in stats.tiers},
    }
