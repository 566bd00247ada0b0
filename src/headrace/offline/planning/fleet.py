"""A job on several workers: each has an admission policy of its own over its part, and takes from others at the end.

The job is cut beforehand (`cut`) by what it should take on each worker's device. What was foreseen wrongly is put right
when a worker has admitted all of its part: it takes as much of what waits at the worker that would be last as lets both
end together, by the speeds seen so far; whole subtrees that the other has not begun come first. A policy: no clock, no
I/O; with one worker it is that worker's policy.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.offline.planning.admission import make_admission
from headrace.offline.planning.blend import PAGE
from headrace.offline.planning.cut import Costs, cut
from headrace.offline.planning.lengths import PRIOR_SHARE
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.target import Target
from headrace.offline.planning.tree import Ints, PrefixTree
from headrace.perf.density import CostRates

#: A worker's speed is believed once it has done this part of its share of the job; before, the device's numbers are.
EVIDENCE = 0.02
#: Less than this part of a worker's share is taken only where it is much of what waits (own).
WORTH = 0.01
NOBODY = -1


class Fleet:
    """Names requests for each of several workers; every request exactly once, but for those of a worker that was lost.

    Args:
        order: one of `ORDERS`, of each part.
        requests: of the job.
        targets: the workers.
        seed: of random orders and samples.
        lengths: output lengths where they are known; None: they are estimated while the job runs.
    """

    def __init__(
        self,
        order: str,
        requests: JobRequests,
        targets: Sequence[Target],
        seed: int = 0,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        count = len(requests)
        self._alive = [True] * len(targets)
        self._owner = np.zeros(count, np.int64)
        self._waiting = np.ones(count, bool)
        self._under_way: list[dict[int, None]] = [{} for _ in targets]
        self._many = len(targets) > 1 and count > 0
        if self._many:
            tree = PrefixTree.of(requests, PAGE)
            costs = [_costs(requests, tree, target, lengths) for target in targets]
            self._owner = cut(tree, costs)
            self._tree = tree
            self._seconds = costs[0].seconds
            self._top = np.full(count, -1, np.int64)
            self._top[tree.leaves] = tree.top()
            self._begun = np.zeros((len(targets), len(tree.parent)), bool)
            totals = np.array([float(each.seconds.sum()) for each in costs])
            self._foreseen = totals[0] / np.maximum(totals, 1e-12)
            self._waits = np.bincount(self._owner, self._seconds, minlength=len(targets))
            self._runs = np.zeros(len(targets))
            self._done = np.zeros(len(targets))
            self._since: list[float | None] = [None] * len(targets)
            self._now = 0.0
            self._share = float(self._seconds.sum()) / len(targets)
            self._random = np.random.default_rng(seed)
        self._policies = [
            make_admission(
                order,
                requests,
                target.profile,
                target.model,
                target.kv_tokens,
                seed,
                lengths,
                max_seqs=target.max_seqs,
                step_tokens=target.step_tokens,
                part=self._owner == worker if self._many else None,
            )
            for worker, target in enumerate(targets)
        ]

    @property
    def remaining(self) -> int:
        """Requests that no worker has been given yet."""
        return sum(policy.remaining for policy, alive in zip(self._policies, self._alive) if alive)

    @property
    def follows_progress(self) -> bool:
        """See `Admission.follows_progress`."""
        return any(policy.follows_progress for policy, alive in zip(self._policies, self._alive) if alive)

    def owner(self, request: int) -> int:
        """The worker that has a request, or will."""
        return int(self._owner[request])

    def step_tokens(self, worker: int) -> int | None:
        """See `Admission.step_tokens`."""
        return self._policies[worker].step_tokens

    def admit(self, worker: int, now: float) -> list[int]:
        """Requests for a worker now; see `Admission.admit`.

        Args:
            worker: which.
            now: seconds, by any clock that never runs backwards.
        """
        if not self._alive[worker]:
            return []
        policy = self._policies[worker]
        taken = policy.admit()
        if not self._many:
            self._under_way[worker].update(dict.fromkeys(taken))
            return taken
        self._now = now
        self._give(worker, taken)
        if not policy.remaining and self._take_over(worker):
            more = policy.admit()
            self._give(worker, more)
            taken += more
        return taken

    def progress(self, requests: Ints, output_tokens: Ints) -> None:
        """How many tokens admitted requests have produced so far."""
        if not self._many:
            self._policies[0].progress(requests, output_tokens)
            return
        owners = self._owner[requests]
        for worker, policy in enumerate(self._policies):
            own = owners == worker
            if self._alive[worker] and own.any():
                policy.progress(requests[own], output_tokens[own])

    def finish(self, request: int, output_tokens: int, now: float) -> None:
        """An admitted request has ended."""
        worker = int(self._owner[request])
        del self._under_way[worker][request]
        if self._many:
            self._now = now
            self._runs[worker] -= self._seconds[request]
            self._done[worker] += self._seconds[request]
        for other, policy in enumerate(self._policies):
            if other == worker:
                policy.finish(request, output_tokens)
            elif self._alive[other]:
                policy.learn(request, output_tokens)

    def lose(self, worker: int) -> bool:
        """A worker is gone: what it had goes to the others; False where there is none."""
        if self._alive[worker]:
            self._alive[worker] = False
            heirs = [other for other, alive in enumerate(self._alive) if alive]
            left = np.flatnonzero((self._owner == worker) & self._waiting)
            left = np.concatenate((left, np.array(list(self._under_way[worker]), np.int64)))
            self._under_way[worker].clear()
            if heirs and len(left):
                self._waiting[left] = True
                parts = np.array_split(left[np.argsort(self._top[left], kind="stable")], len(heirs))
                for heir, part in zip(heirs, parts):
                    if len(part):
                        self._hand(part, heir)
        return any(self._alive)

    # -- several workers ------------------------------------------------------------------------------------------

    def _give(self, worker: int, taken: list[int]) -> None:
        """Requests begin at a worker."""
        if not taken:
            return
        self._under_way[worker].update(dict.fromkeys(taken))
        ids = np.array(taken, np.int64)
        self._waiting[ids] = False
        self._begun[worker, self._top[ids][self._top[ids] >= 0]] = True
        seconds = float(self._seconds[ids].sum())
        self._waits[worker] -= seconds
        self._runs[worker] += seconds
        if self._since[worker] is None:
            self._since[worker] = self._now

    def _hand(self, requests: Ints, worker: int) -> None:
        """Waiting requests, withdrawn from whoever had them, become a worker's."""
        self._owner[requests] = worker
        self._waits[worker] += float(self._seconds[requests].sum())
        self._policies[worker].extend(requests)

    def _take_over(self, thief: int) -> bool:
        """A worker that has admitted all it had takes from the one that would be last; False: there is nothing."""
        speeds = self._speeds()
        left = self._waits + self._runs / 2  # what runs is half done, on average
        able = [
            worker
            for worker, alive in enumerate(self._alive)
            if alive and worker != thief and self._policies[worker].remaining
        ]
        if not able:
            return False
        victim = max(able, key=lambda worker: float(left[worker] / speeds[worker]))
        wanted = (left[victim] * speeds[thief] - left[thief] * speeds[victim]) / (speeds[thief] + speeds[victim])
        wanted = min(float(wanted), float(self._waits[victim]))
        if wanted < WORTH * self._share and wanted < self._waits[victim] / 4:
            return False
        chosen = self._choose(victim, wanted)
        if not len(chosen):
            return False
        self._policies[victim].withdraw(chosen)
        self._waits[victim] -= float(self._seconds[chosen].sum())
        self._hand(chosen, thief)
        return True

    def _speeds(self) -> NDArray[np.float64]:
        """Seconds of work, as foreseen for the first worker, that each does in a second."""
        seen = self._foreseen.copy()
        past = [0.0 if since is None else self._now - since for since in self._since]
        if all(
            passed > 0 and done >= EVIDENCE * self._share
            for passed, done, alive in zip(past, self._done, self._alive)
            if alive
        ):
            seen = np.array([done / max(passed, 1e-9) for done, passed in zip(self._done, past)])
        return np.asarray(np.maximum(seen, 1e-9), np.float64)

    def _choose(self, victim: int, wanted: float) -> Ints:
        """Waiting requests of a worker that take about so many seconds: whole subtrees not begun there come first."""
        mine = self._tree.leaves[(self._owner[self._tree.leaves] == victim) & self._waiting[self._tree.leaves]]
        top = self._top[mine]
        group = np.where(top >= 0, top, len(self._begun[0]) + np.arange(len(mine)))
        names, member = np.unique(group, return_inverse=True)
        seconds = np.bincount(member, self._seconds[mine])
        begun = np.zeros(len(names), bool)
        trees = names < len(self._begun[0])
        begun[trees] = self._begun[victim, names[trees]]
        order = self._random.permutation(len(names))  # so that what is taken is as dense as what stays
        order = order[np.argsort(begun[order], kind="stable")]
        chosen = np.zeros(len(names), bool)
        fitting = order[seconds[order] <= wanted]
        chosen[fitting[np.cumsum(seconds[fitting]) <= wanted]] = True
        taken: Ints = mine[chosen[member]]
        missing = wanted - float(self._seconds[taken].sum())
        if missing > wanted / 2:  # what is left is a few large subtrees: the last leaves of the largest
            largest = int(np.argmax(np.where(chosen, -1.0, seconds)))
            leaves = mine[member == largest][::-1] if not chosen[largest] else mine[:0]
            taken = np.concatenate((taken, leaves[np.cumsum(self._seconds[leaves]) <= missing]))
        return taken


def _costs(requests: JobRequests, tree: PrefixTree, target: Target, lengths: NDArray[np.int64] | None) -> Costs:
    """What each request takes on a worker, its prefix counted where it is computed first."""
    rates = CostRates.of(target.profile, target.model, target.step_tokens)
    prompts = requests.prompt_lengths
    outputs = np.maximum(1.0, PRIOR_SHARE * requests.max_tokens) if lengths is None else lengths
    saved = np.empty(len(requests), np.int64)
    saved[tree.leaves] = tree.shared
    return Costs(rates.compute(prompts, outputs, saved), rates.memory(prompts, outputs))
