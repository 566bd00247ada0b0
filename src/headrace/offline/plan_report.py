"""What a job asks for, and what each order of its requests would take: the work behind `headrace plan`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.offline.planning.admission import ORDERS, make_admission
from headrace.offline.planning.blend import PAGE
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.simulated_engine import Run, SimulatedEngine
from headrace.offline.planning.target import Target
from headrace.offline.planning.tree import Floats, Ints, PrefixTree, borrowed_tokens
from headrace.perf.density import CostRates, density
from headrace.perf.roofline import optimum_seconds

#: Edges of the density histogram, powers of two.
_EDGES = tuple(2.0**power for power in range(-6, 8))


@dataclass(frozen=True)
class Group:
    """One kind of request of a job.

    Attributes:
        number: as in `JobRequests.groups`.
        requests, prompt_tokens: how many.
        output_tokens: expected.
        sharing: share of its prompt tokens that need no computation.
        compute_s, memory_s: seconds of both kinds of work.
        histogram: requests by density, between the edges of `edges()`.
    """

    number: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    sharing: float
    compute_s: float
    memory_s: float
    histogram: tuple[int, ...]

    @property
    def density(self) -> float:
        """Compute over memory, sharing counted."""
        return density(self.compute_s, self.memory_s)


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
        """The plan as plain data; `sharing_kept` is that of the blended order."""
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


def edges() -> tuple[float, ...]:
    """Inner edges of the density histograms."""
    return _EDGES


def make_plan(
    requests: JobRequests,
    lengths: NDArray[np.int64],
    target: Target,
    orders: Sequence[str] = ORDERS,
    seed: int = 0,
    known: bool = False,
    advance: Callable[[str], None] = lambda order: None,
) -> Plan:
    """Profile a job, and simulate it in each order.

    Args:
        requests: of the job.
        lengths: output tokens each is expected to produce.
        target: what to plan for.
        orders: which to simulate.
        seed: of random choices.
        known: the blended order may count on the lengths; else it learns them while the job runs.
        advance: told the name of each order when its run is done.
    """
    profile, model = target.profile, target.model
    rates = CostRates.of(profile, model, target.step_tokens)
    leaves, exact = requests.by_tokens.leaves, requests.by_tokens.common
    tree = PrefixTree.of(requests, PAGE)
    prompts = requests.prompt_lengths
    saved = np.empty(len(requests), np.int64)
    saved[leaves] = exact
    compute, memory = rates.compute(prompts, lengths, saved), rates.memory(prompts, lengths)
    total, read = float(compute.sum()), float(memory.sum())
    plan = Plan(
        requests=len(requests),
        prompt_tokens=int(prompts.sum()),
        output_tokens=int(lengths.sum()),
        sharing=float(saved.sum() / prompts.sum()),
        shared_tokens=int(exact.sum()),
        compute_s=total,
        memory_s=read,
        optimum_s=optimum_seconds(total, read, profile),
        overlaps=bool(profile.overlap),
        groups=_groups(requests, lengths, saved, compute, memory),
    )
    for order in orders:
        engine = SimulatedEngine(
            requests,
            lengths,
            tree,
            profile,
            model,
            target.kv_tokens,
            max_seqs=target.max_seqs,
            step_tokens=target.step_tokens,
            borrowed=borrowed_tokens(tree, exact, PAGE),
        )
        admission = make_admission(
            order,
            requests,
            profile,
            model,
            target.kv_tokens,
            seed,
            lengths if known else None,
            max_seqs=target.max_seqs,
            step_tokens=target.step_tokens,
        )
        plan.runs[order] = engine.run(admission)
        advance(order)
    return plan


def _groups(requests: JobRequests, lengths: Ints, saved: Ints, compute: Floats, memory: Floats) -> list[Group]:
    bins = np.searchsorted(_EDGES, compute / np.maximum(memory, 1e-12))
    found = []
    for number in np.unique(requests.groups).tolist():
        chosen = requests.groups == number
        prompt_tokens = int(requests.prompt_lengths[chosen].sum())
        found.append(
            Group(
                number=number,
                requests=int(chosen.sum()),
                prompt_tokens=prompt_tokens,
                output_tokens=int(lengths[chosen].sum()),
                sharing=float(saved[chosen].sum() / prompt_tokens),
                compute_s=float(compute[chosen].sum()),
                memory_s=float(memory[chosen].sum()),
                histogram=tuple(np.bincount(bins[chosen], minlength=len(_EDGES) + 1).tolist()),
            )
        )
    return sorted(found, key=lambda group: -(group.compute_s + group.memory_s))


def _finite(value: float) -> float | None:
    return round(value, 4) if np.isfinite(value) else None
