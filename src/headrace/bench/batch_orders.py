"""Offline jobs on the engine itself, in one order after the other, beside what was predicted, and beside a peer."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headrace.bench.batch_mixes import Job
from headrace.bench.calibrate import roofline_profile
from headrace.bench.local_engine import BatchRun, LocalEngine, warm_up
from headrace.bench.peers import CommandPeer, PeerRun
from headrace.bench.progress import progress
from headrace.bench.workload import write_requests
from headrace.core.errors import HeadraceError
from headrace.offline.plan_report import Plan, make_plan
from headrace.offline.planning.admission import ORACLE, make_admission
from headrace.offline.planning.target import Target
from headrace.perf.profile import DeviceProfile

#: The order that is compared with the others.
OURS = "blend"


@dataclass(frozen=True)
class Orders:
    """Runs of one job.

    Attributes:
        plan: what was predicted, with true lengths.
        runs: by order, one per round.
        peers: by the order of the file that the peer was given.
    """

    plan: Plan
    runs: dict[str, list[BatchRun]]
    peers: dict[str, list[PeerRun]]

    def seconds(self, order: str) -> float:
        """The median over rounds."""
        return median(run.wall_s for run in self.runs[order])

    def summary(self) -> dict[str, Any]:
        """Medians; ratios are medians over rounds of runs of the same round."""
        orders = {}
        for name, runs in self.runs.items():
            predicted = self.plan.runs[name].seconds
            orders[name] = {
                "wall_s": round(self.seconds(name), 2),
                "predicted_s": round(predicted, 2),
                "predicted_over_wall": round(predicted / self.seconds(name), 3),
                "share_of_optimum": round(self.plan.optimum_s / self.seconds(name), 3),
                "hit_tokens": runs[-1].hit_tokens,
                "steps": runs[-1].steps,
                "preemptions": runs[-1].preemptions,
                "each_s": [round(run.wall_s, 2) for run in runs],
            }
        result: dict[str, Any] = {
            "requests": self.plan.requests,
            "prompt_tokens": self.plan.prompt_tokens,
            "output_tokens": self.plan.output_tokens,
            "sharing": round(self.plan.sharing, 3),
            "optimum_s": round(self.plan.optimum_s, 2),
            "rounds": len(next(iter(self.runs.values()))),
            "orders": orders,
        }
        if OURS in self.runs:
            ours = self.runs[OURS]
            for name in self.runs:
                if name != OURS:
                    result[f"over_{name}"] = round(
                        median(run.wall_s / own.wall_s for run, own in zip(self.runs[name], ours)), 3
                    )
            if "dfs" in self.runs:
                result["sharing_of_dfs"] = round(
                    median(own.hit_tokens / max(1, run.hit_tokens) for run, own in zip(self.runs["dfs"], ours)), 4
                )
            for name, theirs in self.peers.items():
                result[f"over_peer_{name}"] = round(
                    median(run.wall_s / own.wall_s for run, own in zip(theirs, ours)), 3
                )
        for name, theirs in self.peers.items():
            result[f"peer_{name}_s"] = [round(run.wall_s, 2) for run in theirs]
        return result


def measure(
    engine: LocalEngine,
    job: Job,
    orders: Sequence[str],
    peer_command: str | None = None,
    rounds: int = 3,
    salt: str = "",
    profile: DeviceProfile | None = None,
    exact: bool = True,
) -> Orders:
    """Run a job in each order, in turn, then by the peer as it is and in the depth-first order.

    Args:
        engine: with the KV budget and the scheduler's limits that count; every run begins without cached KV.
        job: what to run.
        orders: of `planning.admission.ORDERS`, or `ORACLE`.
        peer_command: as of `CommandPeer`; None: no peer.
        rounds: how often.
        salt: tells jobs apart that run on the same engine.
        profile: of the device; None: as it was measured, or is now.
        exact: outputs must not depend on the order; not so where a row's numbers depend on its batch (16-bit, CUDA).

    Raises:
        HeadraceError: orders gave different outputs although they must not.
    """
    info, limits = engine.info, engine.config.scheduler
    profile = profile or roofline_profile(info, engine.config)
    kv_tokens = info.pages * info.page_size
    target = Target(profile, engine.shape, kv_tokens, limits.max_num_seqs, limits.max_num_batched_tokens)
    lengths = np.array(job.lengths, np.int64)
    plan = make_plan(job.requests, lengths, target, orders)
    runs: dict[str, list[BatchRun]] = {name: [] for name in orders}
    files = {"as_given": list(range(len(job.items)))}
    if peer_command is not None and "dfs" in plan.runs:
        files["dfs"] = plan.runs["dfs"].order
    peers: dict[str, list[PeerRun]] = {name: [] for name in files} if peer_command is not None else {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        programs = {}
        for name in peers:
            path = Path(folder) / f"{name}.jsonl"
            write_requests([job.items[number] for number in files[name]], path)
            programs[name] = CommandPeer(peer_command or "", path)
        for number in range(rounds):
            for order in orders:
                warm_up(engine, job.items, salt=f"{salt}-warm-up-{order}-{number}")
                admission = make_admission(
                    order,
                    job.requests,
                    profile,
                    engine.shape,
                    kv_tokens,
                    seed=number,
                    lengths=lengths if order == ORACLE else None,
                    max_seqs=limits.max_num_seqs,
                    step_tokens=limits.max_num_batched_tokens,
                )
                with progress(f"{order}, round {number + 1} of {rounds}", len(job.items)) as advance:
                    runs[order].append(
                        engine.run(job.items, salt=f"{salt}-{order}-{number}", advance=advance, admission=admission)
                    )
            for name, program in programs.items():
                peers[name].append(program.run())
    first = next(iter(runs.values()))[0].outputs
    for order, several in runs.items():
        for run in several:
            if exact and run.outputs != first:
                differing = sum(run.outputs[name] != tokens for name, tokens in first.items())
                raise HeadraceError(f"order {order} gave {differing} other outputs than {orders[0]}")
    return Orders(plan, runs, peers)
