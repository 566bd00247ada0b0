"""One job on one engine, on two, and on two of which one is slowed to half: what sharing a job brings.

Two engine processes with a thread each live through the whole measurement; every run is a job with a journal and files,
as `headrace batch run` has it, and begins without cached KV. Loading and validation do not count.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from headrace.api.app import make_state
from headrace.api.batch_endpoint import BatchEndpoint
from headrace.bench.batch_mixes import Job
from headrace.bench.cpu_quota import cpu_quota
from headrace.bench.progress import progress
from headrace.bench.workload import write_requests
from headrace.core.config import EngineConfig, ServerConfig
from headrace.core.errors import HeadraceError
from headrace.front.launch import Worker, launch_workers
from headrace.offline.jobs.device import device_of, fleet_of
from headrace.offline.jobs.folder import create_job
from headrace.offline.jobs.runner import JobRunner
from headrace.offline.jobs.spec import JobSpec, new_job_id

#: By name: which workers run the job, and the share of its core that the second one has.
ARMS: dict[str, tuple[tuple[int, ...], float]] = {
    "one": ((0,), 1.0),
    "two": ((0, 1), 1.0),
    "slow": ((1,), 0.5),
    "one and slow": ((0, 1), 0.5),
}


@dataclass
class Shared:
    """Seconds of each arm, one per round."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ARMS})
    hit_tokens: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in ARMS})

    def summary(self) -> dict[str, Any]:
        """Medians, and the two ratios; each ratio is the median over rounds of runs of the same round."""
        one, two, slow, both = (self.seconds[name] for name in ARMS)
        alone = [1 / (1 / a + 1 / b) for a, b in zip(one, slow)]  # if each did its part at its own speed
        return {
            **{f"{name.replace(' ', '_')}_s": round(median(times), 2) for name, times in self.seconds.items()},
            "dp2_speedup": round(median(a / b for a, b in zip(one, two)), 3),
            "share_of_sum_with_one_slowed": round(median(a / b for a, b in zip(alone, both)), 3),
            "rounds": len(one),
            "each_s": {name: [round(s, 2) for s in times] for name, times in self.seconds.items()},
            "cached_tokens": {name: tokens[-1] for name, tokens in self.hit_tokens.items() if tokens},
        }


def measure(config: EngineConfig, job: Job, order: str, rounds: int) -> dict[str, Any]:
    """Start two engines and run the job in all arms, in turn.

    Args:
        config: of each engine; it gets one thread.
        job: what to run.
        order: of its requests.
        rounds: how often.

    Raises:
        HeadraceError: a request failed.
        ConfigError: no CPU quota can be set.
    """
    return asyncio.run(_measure(config, job, order, rounds))


async def _measure(config: EngineConfig, job: Job, order: str, rounds: int) -> dict[str, Any]:
    seen = Shared()
    config = replace(config, model=replace(config.model, threads=1))
    workers = await launch_workers(config, 2)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="headrace-bench-") as home,
            progress("jobs on one and two engines", rounds * len(ARMS)) as advance,
        ):
            few = Job(job.items[:8], job.requests)
            await _run(Path(home), workers, few, order, "first touches")
            for number in range(rounds):
                for name, (chosen, share) in ARMS.items():
                    pid = workers[1].generator.client.info.pid
                    with cpu_quota(pid, share) if share < 1 else nullcontext():
                        mine = [workers[worker] for worker in chosen]
                        seconds, hits = await _run(Path(home), mine, job, order, f"{name}, {number}")
                    seen.seconds[name].append(seconds)
                    seen.hit_tokens[name].append(hits)
                    advance(1)
    finally:
        await asyncio.gather(*(worker.generator.client.close() for worker in workers))
    return seen.summary()


async def _run(home: Path, workers: Sequence[Worker], job: Job, order: str, salt: str) -> tuple[float, int]:
    """Seconds from the first request in to the last result, and the prompt tokens that were cached."""
    identity = new_job_id()
    path = home / f"{identity}.jsonl"
    write_requests(job.items, path, cache_salt=salt)
    folder = create_job(
        JobSpec(
            id=identity,
            origin="cli",
            created_at=time.time(),
            input=str(path),
            output=str(home / f"{identity}.out.jsonl"),
            errors=str(home / f"{identity}.errors.jsonl"),
            order=order,
        ),
        home / "jobs",
    )
    endpoint = BatchEndpoint(*(make_state(each.generator, ServerConfig(), each.config, home) for each in workers))
    devices = [device_of(each.generator.client.info, each.config) for each in workers]
    runner = JobRunner(folder, endpoint, fleet_of(order, devices), windows=[device.window for device in devices])
    state = await runner.run()
    if state.failed or state.completed != len(job.items):
        raise HeadraceError(f"{state.failed} of {state.total} requests failed; see {home}")
    return state.seconds, state.cached_tokens
