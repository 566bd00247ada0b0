"""Reads from several tiers at once, beside what each tier gives alone, alternating in the same run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from headrace.bench.progress import progress
from headrace.bench.row_copier import RowCopier
from headrace.bench.store_chunks import whole
from headrace.store.layout import KVLayout
from headrace.store.load import FoundChunk
from headrace.store.plan_units import LEAST_BYTES
from headrace.store.reader import LoadRequest, Reader
from headrace.store.tiers.throttled import ThrottledTier
from headrace.store.tiers.tier import Tier

#: The two tiers of unequal and varying speed that are measured when none are given.
VARYING_TIERS = ("throttled:600MB/s:memory:1GiB", "throttled:250MB/s@2s,80MB/s@1s:memory:1GiB")

_STEP_UNITS = 1000
_STEP_CHUNKS_PER_LOAD = 16


@dataclass(frozen=True)
class Workload:
    """What is read.

    Attributes:
        layout: of the chunks.
        chunks: what lies on every tier.
        requests: loads in a step; each reads all chunks.
        unit_bytes: bytes read at once; None: as the reader sees fit.
        hedge: whether slow reads are issued again elsewhere.
    """

    layout: KVLayout
    chunks: Sequence[FoundChunk]
    requests: int
    unit_bytes: int | None = None
    hedge: bool = True


@dataclass(frozen=True)
class ReadRun:
    """One step's reads.

    Attributes:
        seconds: from the order to the last delivery.
        by_tier: bytes delivered.
        capacity: bytes that each tier could have given meanwhile by its set rate; None where none is set.
        hedged: units issued a second time.
        late_bytes: bytes read for nothing, because another tier was first.
        units: units delivered.
        cpu_seconds: of the whole process.
    """

    seconds: float
    by_tier: tuple[int, ...]
    capacity: tuple[float | None, ...]
    hedged: int
    late_bytes: int
    units: int
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second of all tiers together."""
        return sum(self.by_tier) / self.seconds


@dataclass(frozen=True)
class StoreReads:
    """Round by round: each tier alone, then the policies; and what a step costs its caller in Python.

    Attributes:
        tiers: their names.
        alone: per tier, one run per round.
        together: per policy, one run per round.
        step_ms: thread CPU time of ordering and awaiting `_STEP_UNITS` units, layer by layer.
    """

    tiers: tuple[str, ...]
    alone: tuple[list[ReadRun], ...]
    together: dict[str, list[ReadRun]]
    step_ms: list[float]

    def capacity(self, policy: str, number: int) -> tuple[float, ...]:
        """Bytes that each tier could have given during a round's run: by its set rate, or by its rate alone."""
        run = self.together[policy][number]
        return tuple(
            alone[number].rate * run.seconds if set_ is None else set_ for set_, alone in zip(run.capacity, self.alone)
        )

    def share(self, policy: str) -> float:
        """What a policy read, as a share of what the tiers could have given meanwhile: the median over rounds."""
        runs = self.together[policy]
        return median(sum(run.by_tier) / sum(self.capacity(policy, number)) for number, run in enumerate(runs))

    def against_best(self, policy: str) -> float:
        """Elapsed time relative to the better tier alone: the median over rounds."""
        return median(
            max(alone[number].rate for alone in self.alone) / run.rate
            for number, run in enumerate(self.together[policy])
        )

    def summary(self) -> dict[str, Any]:
        """Medians; what is not said to be of another policy is of the first one."""
        policy, runs = next(iter(self.together.items()))
        tiers = [
            {
                "name": name,
                "alone_gb_per_s": _gb(median(run.rate for run in self.alone[place])),
                "together_gb_per_s": _gb(median(run.by_tier[place] / run.seconds for run in runs)),
                "capacity_gb_per_s": _gb(
                    median(self.capacity(policy, number)[place] / run.seconds for number, run in enumerate(runs))
                ),
            }
            for place, name in enumerate(self.tiers)
        ]
        return {
            "policy": policy,
            "total_gb_per_s": _gb(median(run.rate for run in runs)),
            "share_of_sum": round(self.share(policy), 4),
            "elapsed_s": round(median(run.seconds for run in runs), 3),
            "elapsed_over_best_alone": round(self.against_best(policy), 3),
            "bytes": sum(runs[-1].by_tier),
            "hedged_units": round(median(run.hedged for run in runs)),
            "late_share": round(median(run.late_bytes / sum(run.by_tier) for run in runs), 4),
            "cpu_us_per_unit": round(median(run.cpu_seconds / run.units for run in runs) * 1e6, 1),
            "step_cost_ms": round(median(self.step_ms), 3),
            "rounds": len(runs),
            "tiers": tiers,
            "policies": {
                name: {
                    "total_gb_per_s": _gb(median(run.rate for run in several)),
                    "share_of_sum": round(self.share(name), 4),
                    "elapsed_over_best_alone": round(self.against_best(name), 3),
                }
                for name, several in self.together.items()
            },
        }


def measure(tiers: Sequence[Tier], workload: Workload, policies: Sequence[str], rounds: int) -> StoreReads:
    """Read the workload from each tier alone (half of the requests) and from all together by each policy, in turn."""
    alone: tuple[list[ReadRun], ...] = tuple([] for _ in tiers)
    together: dict[str, list[ReadRun]] = {policy: [] for policy in policies}
    step_ms = []
    half = replace(workload, requests=max(1, workload.requests // 2))
    with progress("reads", rounds * (len(tiers) + len(together))) as advance:
        for _ in range(rounds):
            for tier, runs in zip(tiers, alone):
                runs.append(read([tier], half, policies[0]))
                advance(1)
            for policy, runs in together.items():
                runs.append(read(tiers, workload, policy))
                advance(1)
            step_ms.append(step_cost(tiers, workload, policies[0]))
    return StoreReads(tuple(tier.name for tier in tiers), alone, together, step_ms)


def read(tiers: Sequence[Tier], workload: Workload, policy: str) -> ReadRun:
    """Read all chunks for every request, as one step: wait for layer after layer of all of them."""
    reader = _reader(tiers, workload, policy)
    requests = [_request(workload.chunks, len(tiers), workload.layout)] * workload.requests
    try:
        cpu, begun = time.process_time(), time.monotonic()
        loads = reader.load_batch(requests)
        for layer in range(workload.layout.layers):
            for load in loads:
                load.wait(layer)
        ended, cpu = time.monotonic(), time.process_time() - cpu
        by_tier = np.sum([load.bytes_by_tier() for load in loads], axis=0)
    finally:
        reader.close()  # waits for late reads, so they do not disturb the next run
    reads = reader.reads()
    return ReadRun(
        ended - begun,
        tuple(int(nbytes) for nbytes in by_tier),
        tuple(tier.capacity_between(begun, ended) if isinstance(tier, ThrottledTier) else None for tier in tiers),
        sum(tier.hedges for tier in reads),
        sum(tier.late_bytes for tier in reads),
        sum(tier.units - tier.late_units for tier in reads),
        cpu,
    )


def step_cost(tiers: Sequence[Tier], workload: Workload, policy: str) -> float:
    """Milliseconds of CPU time that the ordering thread spends on a step with 1,000 pending units, waits included."""
    layout = workload.layout
    at_once = max(1, (workload.unit_bytes or LEAST_BYTES) // layout.record_bytes(layout.kv_heads, layout.chunk_tokens))
    units = -(-layout.layers // at_once)
    count = -(-_STEP_UNITS // units)
    chunks = [workload.chunks[number % len(workload.chunks)] for number in range(count)]
    requests = [
        _request(chunks[first : first + _STEP_CHUNKS_PER_LOAD], len(tiers), layout)
        for first in range(0, count, _STEP_CHUNKS_PER_LOAD)
    ]
    reader = _reader(tiers, workload, policy)
    try:
        # Threads are started once in the life of a reader: by a step before.
        for load in reader.load_batch(requests):
            load.wait_all()
        begun = time.thread_time()
        loads = reader.load_batch(requests)
        for layer in range(layout.layers):
            for load in reversed(loads):  # the last one's units come last: the others are ready by then
                load.wait(layer)
        spent = time.thread_time() - begun
    finally:
        reader.close()
    return spent * 1e3 * _STEP_UNITS / (count * units)


def _reader(tiers: Sequence[Tier], workload: Workload, policy: str) -> Reader:
    return Reader(tiers, workload.layout, policy, unit_bytes=workload.unit_bytes, hedge=workload.hedge)


def _request(chunks: Sequence[FoundChunk], n_tiers: int, layout: KVLayout) -> LoadRequest:
    here = tuple(range(n_tiers))
    found = [replace(chunk, parts=tuple(replace(part, tiers=here) for part in chunk.parts)) for chunk in chunks]
    return found, whole(layout), RowCopier(layout)


def _gb(rate: float) -> float:
    return round(rate / 1e9, 4)
