"""What a job asks for, and what each order of its requests would take: the work behind `headrace plan`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.offline.plan_groups import Group, edges, groups_of, predict_groups
from headrace.offline.plan_workload import Workload
from headrace.offline.planning.admission import ORDERS
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.simulated_engine import Run
from headrace.offline.planning.target import Target
from headrace.perf.density import density


@dataclass
class Plan:
    """A job's profile and its predicted runs.

    Attributes:
        prompt_tokens, output_tokens: in all; output tokens are expected ones.
        sharing: share of the prompt tokens that perfect prefix sharing leaves out.
        shared_tokens: the same in tokens.
        compute_s, memory_s: seconds of both kinds of work with perfect sharing.
        optimum_s: the least time by the device's overlap rule.
        overlaps: whether the device runs both kinds side by side.
        groups: by kind of request.
        runs: predicted runs by order.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    sharing: float
    shared_tokens: int
    compute_s: float
    memory_s: float
    optimum_s: float
    overlaps: bool
    groups: list[Group]
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Compute over memory of the whole, sharing counted."""
        return density(self.compute_s, self.memory_s)

    def kept(self, order: str) -> float:
        """Share of the possible sharing that a predicted run has."""
        return self.runs[order].hit_tokens / self.shared_tokens if self.shared_tokens else 1.0

    def summary(self) -> dict[str, Any]:
        """The plan of the whole as plain data; `sharing_kept` is that of the blended order."""
        orders = {
            name: {
                "predicted_s": round(run.seconds, 3),
                "share_of_optimum": round(self.optimum_s / run.seconds, 4),
                "sharing_kept": round(self.kept(name), 4),
                "steps": run.steps,
                "preemptions": run.preemptions,
            }
            for name, run in self.runs.items()
        }
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "expected_output_tokens": self.output_tokens,
            "sharing": round(self.sharing, 4),
            "sharing_kept": round(self.kept("blend"), 4) if "blend" in self.runs else None,
            "density": _finite(self.density),
            "compute_s": round(self.compute_s, 3),
            "memory_s": round(self.memory_s, 3),
            "optimum_s": round(self.optimum_s, 3),
            "device_overlaps": self.overlaps,
            "orders": orders,
        }

    def by_group(self, names: Sequence[str]) -> dict[str, Any]:
        """The groups as plain data, the largest first.

        Args:
            names: of the groups, by number.
        """
        groups = [
            {
                "name": names[group.number],
                "requests": group.requests,
                "prompt_tokens": group.prompt_tokens,
                "expected_output_tokens": group.output_tokens,
                "sharing": round(group.sharing, 4),
                "density": _finite(group.density),
                "compute_s": round(group.compute_s, 3),
                "memory_s": round(group.memory_s, 3),
                "density_histogram": list(group.histogram),
                "simulated_requests": group.simulated,
                "orders": {
                    name: {"predicted_s": round(one.seconds, 3), "share_of_optimum": round(one.share, 4)}
                    for name, one in group.orders.items()
                },
            }
            for group in self.groups
        ]
        return {"density_edges": list(edges()), "groups": groups}


def make_plan(
    requests: JobRequests,
    lengths: NDArray[np.int64],
    target: Target,
    orders: Sequence[str] = ORDERS,
    seed: int = 0,
    known: bool = False,
    by_group: bool = False,
    advance: Callable[[int], None] = lambda parts: None,
) -> Plan:
    """Profile a job, and simulate it in each order.

    Args:
        requests: of the job.
        lengths: output tokens each is expected to produce.
        target: what to plan for.
        orders: which to simulate.
        seed: of random choices.
        known: the blended order may count on the lengths; else it learns them while the job runs.
        by_group: the largest groups are simulated too, each alone.
        advance: told after each order, and after each group.
    """
    workload = Workload(requests, lengths, target)
    saved, compute, memory = workload.saved, workload.compute, workload.memory
    prompt_tokens = int(requests.prompt_lengths.sum())
    plan = Plan(
        requests=len(requests),
        prompt_tokens=prompt_tokens,
        output_tokens=int(lengths.sum()),
        sharing=float(saved.sum() / prompt_tokens),
        shared_tokens=int(saved.sum()),
        compute_s=float(compute.sum()),
        memory_s=float(memory.sum()),
        optimum_s=workload.optimum_s,
        overlaps=bool(target.profile.overlap),
        groups=groups_of(workload),
    )
    for order in orders:
        plan.runs[order] = workload.run(order, seed, known)
        advance(1)
    if by_group:
        plan.groups = predict_groups(workload, plan.groups, plan.runs, seed, known, advance)
    return plan


def _finite(value: float) -> float | None:
    return round(value, 4) if np.isfinite(value) else None
