"""Orders that are fixed before a job begins: first come first served, random, depth first, balanced."""

import numpy as np
from numpy.typing import NDArray

from headrace.offline.planning.lengths import PRIOR_SHARE
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.tree import Floats, Ints
from headrace.perf.density import CostRates


def fixed_order(
    order: str, requests: JobRequests, seed: int, rates: CostRates, lengths: NDArray[np.int64] | None = None
) -> Ints:
    """The requests in one of the orders `fcfs`, `random`, `dfs`, `balance`.

    Args:
        order: its name.
        requests: of the job.
        seed: of the random order.
        rates: what requests cost (balance).
        lengths: output lengths where known; None: a share of `max_tokens` (balance).
    """
    if order == "random":
        return np.random.default_rng(seed).permutation(len(requests))
    if order == "dfs":
        return requests.by_tokens.leaves
    if order == "balance":
        outputs = requests.max_tokens * PRIOR_SHARE if lengths is None else lengths
        prompts = requests.prompt_lengths
        return balanced(rates.compute(prompts, outputs), rates.memory(prompts, outputs))
    return np.arange(len(requests))


def balanced(compute: Floats, memory: Floats) -> Ints:
    """Every stretch of the order has about the density of the whole, prefixes disregarded.

    Requests are taken from the dense or the thin end, whichever brings the density of those taken nearer to that of the
    whole.
    """
    falling = np.argsort(-(compute / np.maximum(memory, 1e-12)), kind="stable")
    c, m = compute[falling].tolist(), memory[falling].tolist()
    total_c, total_m = float(compute.sum()), float(memory.sum())
    left, right = 0, len(c) - 1
    done_c = done_m = 0.0
    order = []
    while left <= right:
        # Density so far at or below the whole's: take from the compute-heavy end.
        if done_c * total_m <= done_m * total_c:
            place = left
            left += 1
        else:
            place = right
            right -= 1
        done_c, done_m = done_c + c[place], done_m + m[place]
        order.append(place)
    return falling[np.array(order, np.int64)]


class FixedAdmission:
    """Hands requests over in a given order, some ahead of what can run, so that the engine's queue is never empty.

    Args:
        order: request numbers.
        window: requests under way at most.
        part: which of them it is to admit; None: all.
    """

    def __init__(self, order: Ints, window: int, part: NDArray[np.bool_] | None = None) -> None:
        self._place = np.empty(len(order), np.int64)
        self._place[order] = np.arange(len(order))
        self._waiting: list[int] = (order if part is None else order[part[order]]).tolist()[::-1]  # the next one last
        self._window = max(1, window)
        self._under_way = 0

    def admit(self) -> list[int]:
        """The next ones, as many as the window takes."""
        kept = max(0, len(self._waiting) - max(0, self._window - self._under_way))
        taken = self._waiting[kept:][::-1]
        del self._waiting[kept:]
        self._under_way += len(taken)
        return taken

    def progress(self, requests: Ints, output_tokens: Ints) -> None:
        """Changes nothing: the order is fixed."""

    def finish(self, request: int, output_tokens: int) -> None:
        """One place is free."""
        self._under_way -= 1

    def withdraw(self, requests: Ints) -> None:
        """See `Admission.withdraw`."""
        gone = set(requests.tolist())
        self._waiting = [request for request in self._waiting if request not in gone]

    def extend(self, requests: Ints) -> None:
        """They come where the order has them."""
        waiting = np.concatenate((np.array(self._waiting, np.int64), requests))
        self._waiting = waiting[np.argsort(-self._place[waiting])].tolist()

    def learn(self, request: int, output_tokens: int) -> None:
        """Changes nothing."""

    @property
    def step_tokens(self) -> int | None:
        """As many as the engine takes."""
        return None

    @property
    def follows_progress(self) -> bool:
        """Never."""
        return False

    @property
    def remaining(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)
