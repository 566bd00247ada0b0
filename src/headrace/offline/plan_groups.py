"""A job's groups of prompts: what each asks for, and what each would take by itself in every order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.offline.plan_workload import Workload
from headrace.offline.planning.simulated_engine import Run
from headrace.offline.planning.tree import Ints
from headrace.perf.density import density
from headrace.perf.roofline import optimum_seconds

#: Groups that are simulated: the largest, by the work in them.
MOST_GROUPS = 10
#: Of all groups together at most so many requests and tokens, or this part of the job's where that is more.
_REQUESTS, _TOKENS, _PART = 8000, 8_000_000, 1 / 8
#: Runs of neighbours that a sample consists of.
_STRETCHES = 8
#: Edges of the density histogram, powers of two.
_EDGES = tuple(2.0**power for power in range(-6, 8))


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a group would take alone in one order.

    Attributes:
        seconds: of the whole group.
        share: of its optimum.
    """

    seconds: float
    share: float


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
        simulated: requests that the predictions come from.
        orders: the group alone, by order; empty where it was not simulated.
    """

    number: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    sharing: float
    compute_s: float
    memory_s: float
    histogram: tuple[int, ...]
    simulated: int = 0
    orders: Mapping[str, Predicted] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of prompts and outputs."""
        return self.prompt_tokens + self.output_tokens

    @property
    def density(self) -> float:
        """Compute over memory, sharing counted."""
        return density(self.compute_s, self.memory_s)


def edges() -> tuple[float, ...]:
    """Inner edges of the density histograms."""
    return _EDGES


def groups_of(workload: Workload) -> list[Group]:
    """The groups of a job, the largest first; not simulated."""
    requests, compute, memory = workload.requests, workload.compute, workload.memory
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
                output_tokens=int(workload.lengths[chosen].sum()),
                sharing=float(workload.saved[chosen].sum() / prompt_tokens),
                compute_s=float(compute[chosen].sum()),
                memory_s=float(memory[chosen].sum()),
                histogram=tuple(np.bincount(bins[chosen], minlength=len(_EDGES) + 1).tolist()),
            )
        )
    return sorted(found, key=lambda group: -(group.compute_s + group.memory_s))


def predict_groups(
    workload: Workload,
    groups: Sequence[Group],
    runs: Mapping[str, Run],
    seed: int = 0,
    known: bool = False,
    advance: Callable[[int], None] = lambda groups: None,
) -> list[Group]:
    """The groups with what the largest of them take alone in each order.

    A group is simulated as a job of its own. Of a large one only a sample is, so that all groups together take no
    longer than a part of the job: neighbours in the order of their tokens, which keeps what they share; the group's
    seconds are then its optimum over the sample's share of its own. Two things are not the same in a sample: its
    beginning and end, when the engine is not full, weigh more, and its prefixes are fewer, so that orders which do not
    follow them lose fewer of them from the pool.

    Args:
        workload: the whole job.
        groups: of it.
        runs: of the whole job by order: these orders are predicted.
        seed: of random choices.
        known: see `Workload.run`.
        advance: told after each group.
    """
    count = min(MOST_GROUPS, len(groups))
    requests = max(_REQUESTS, _PART * len(workload.requests)) / count
    tokens = max(_TOKENS, _PART * sum(group.tokens for group in groups)) / count
    found = []
    for group in groups[:MOST_GROUPS]:
        alone = _sample(workload, group, requests, tokens)
        found.append(_predicted(workload, group, alone, runs, seed, known))
        advance(1)
    return [*found, *groups[MOST_GROUPS:]]


def _predicted(
    workload: Workload, group: Group, chosen: Ints, runs: Mapping[str, Run], seed: int, known: bool
) -> Group:
    if group.requests == len(workload.requests):
        orders = {name: Predicted(run.seconds, workload.optimum_s / run.seconds) for name, run in runs.items()}
        return replace(group, simulated=group.requests, orders=orders)
    alone = Workload(workload.requests.take(chosen), workload.lengths[chosen], workload.target)
    optimum = alone.optimum_s
    if len(chosen) < group.requests:
        optimum = optimum_seconds(group.compute_s, group.memory_s, workload.target.profile)
    orders = {}
    for name in runs:
        share = alone.optimum_s / alone.run(name, seed, known).seconds
        orders[name] = Predicted(optimum / share, share)
    return replace(group, simulated=len(chosen), orders=orders)


def _sample(workload: Workload, group: Group, requests: float, tokens: float) -> Ints:
    """Some requests of a group, ascending: all, or runs of neighbours from all over the order of their tokens."""
    mine = workload.leaves[workload.requests.groups[workload.leaves] == group.number]
    most = int(min(max(requests, 2 * workload.target.max_seqs), tokens * group.requests / group.tokens))
    most = max(_STRETCHES, most)
    if len(mine) <= most:
        return np.sort(mine)
    length = most // _STRETCHES
    begins = np.linspace(0, len(mine) - length, _STRETCHES).astype(np.int64)
    return np.sort(mine[(begins[:, None] + np.arange(length)).ravel()])
