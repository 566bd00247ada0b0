"""Offline throughput of the engine, beside the roofline of the work and beside peers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.calibrate import roofline_profile
from headrace.bench.local_engine import BatchRun, LocalEngine, peak_rss_mb, warm_up
from headrace.bench.peers import Peer, PeerRun
from headrace.bench.progress import progress
from headrace.bench.workload import Item
from headrace.perf.model_shape import ModelShape
from headrace.perf.profile import DeviceProfile
from headrace.perf.roofline import roofline_seconds, work_of


@dataclass(frozen=True)
class Throughput:
    """Ours, round by round, and each peer's, alternating with ours."""

    ours: list[BatchRun]
    peers: dict[str, list[PeerRun]]
    peak_rss_mb: float
    roofline_s: float

    def summary(self) -> dict[str, Any]:
        """Medians as one flat object."""
        wall = median(run.wall_s for run in self.ours)
        last = self.ours[-1]
        result: dict[str, Any] = {
            "wall_s": round(wall, 3),
            "total_tokens_per_s": round(median(run.total_tokens_per_s for run in self.ours), 1),
            "output_tokens_per_s": round(median(run.output_tokens_per_s for run in self.ours), 1),
            "steps": last.steps,
            "hit_tokens": last.hit_tokens,
            "preemptions": last.preemptions,
            "prompt_tokens": last.prompt_tokens,
            "output_tokens": last.output_tokens,
            "peak_rss_mb": round(self.peak_rss_mb),
            "roofline_s": round(self.roofline_s, 3),
            "roofline_share": round(self.roofline_s / wall, 4),
            "rounds": len(self.ours),
        }
        for name, runs in self.peers.items():
            rate = median(run.total_tokens_per_s for run in runs)
            result[f"{name}_wall_s"] = round(median(run.wall_s for run in runs), 3)
            result[f"{name}_total_tokens_per_s"] = round(rate, 1)
            result[f"speedup_over_{name}"] = round(result["total_tokens_per_s"] / rate, 3)
        return result


def measure(engine: LocalEngine, batch: Sequence[Item], peers: Sequence[Peer] = (), rounds: int = 1) -> Throughput:
    """Run the batch `rounds` times, each round ours first, then every peer; every round starts without cached KV.

    Ours is warmed up before each round, as a peer that is started anew warms itself up: what lies idle for the minutes
    that a peer takes is slow at first (seen: 10% of a round).
    """
    ours: list[BatchRun] = []
    theirs: list[list[PeerRun]] = [[] for _ in peers]
    peak = 0.0
    for number in range(rounds):
        warm_up(engine, batch, salt=f"warm-up-{number}")
        with progress(f"headrace, round {number + 1} of {rounds}", len(batch)) as advance:
            ours.append(engine.run(batch, salt=f"round-{number}", advance=advance))
        peak = peak or peak_rss_mb()  # before a peer in this process adds its own
        for peer, runs in zip(peers, theirs):
            runs.append(peer.run())
    profile = roofline_profile(engine.info, engine.config)
    limit = roofline_of(batch, ours[-1], engine.shape, profile)
    return Throughput(ours, {peer.name: runs for peer, runs in zip(peers, theirs)}, peak, limit)


def roofline_of(batch: Sequence[Item], run: BatchRun, shape: ModelShape, profile: DeviceProfile) -> float:
    """The least time the batch could take, with the output lengths it turned out to have."""
    outputs = [max(1, len(run.outputs[item.custom_id])) for item in batch]
    return roofline_seconds(work_of([item.prompt for item in batch], outputs, shape), shape, profile)


def write_outputs(batch: Sequence[Item], run: BatchRun, path: Path) -> None:
    """One line `{custom_id, token_ids}` per request, in the order of the batch."""
    with path.open("w", encoding="utf-8") as file:
        for item in batch:
            file.write(json.dumps({"custom_id": item.custom_id, "token_ids": run.outputs[item.custom_id]}) + "\n")
