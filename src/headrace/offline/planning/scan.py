"""A density order with a cursor at each end."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.offline.planning.tree import Floats, Ints, running_sums

LEFT, RIGHT = 0, 1
#: Requests at each end whose density stands for the end.
WINDOW = 64
#: Requests looked at where the one at the end of the scan has no room.
LOOKAHEAD = 8


class Scan:
    """Waiting requests from compute-heavy to memory-heavy; both ends are taken from until the cursors meet.

    Args:
        requests: int64 [n], in the order of the scan.
        compute, memory: float64 [n], seconds each adds.
        waiting: bool, by request; false once it is taken. Changed by the owner.
    """

    def __init__(self, requests: Ints, compute: Floats, memory: Floats, waiting: NDArray[np.bool_]) -> None:
        self._requests = requests
        self._waiting = waiting
        self._left, self._right = 0, len(requests) - 1
        self._compute, self._memory = running_sums(compute), running_sums(memory)

    def skip_taken(self) -> None:
        """Move both cursors to requests that wait; there must be one."""
        while self._left < self._right and not self._waiting[self._requests[self._left]]:
            self._left += 1
        while self._right > self._left and not self._waiting[self._requests[self._right]]:
            self._right -= 1

    def end(self, side: int) -> int:
        """The request at an end."""
        return int(self._requests[self._left if side == LEFT else self._right])

    def ahead(self, side: int) -> Iterator[int]:
        """The next few requests at an end: where the first has no room for now, one behind it may."""
        step = 1 if side == LEFT else -1
        place, seen = (self._left if side == LEFT else self._right), 0
        while self._left <= place <= self._right and seen < LOOKAHEAD:
            request = int(self._requests[place])
            place += step
            if self._waiting[request]:
                seen += 1
                yield request

    def left_window(self) -> Ints:
        """The requests that stand for the left end."""
        return self._requests[self._left : min(self._right + 1, self._left + WINDOW)]

    def densities(self) -> tuple[float, float]:
        """Compute over memory of the left and of the right end."""
        first, last = self._left, self._right + 1
        spans = (first, min(last, first + WINDOW)), (max(first, last - WINDOW), last)
        left, right = (ratio(self._compute[b] - self._compute[a], self._memory[b] - self._memory[a]) for a, b in spans)
        return left, right


def pulled(top: Ints, last: tuple[int, int], warm: NDArray[np.bool_]) -> Ints:
    """How far subtrees whose prefix is in the pool are pulled to an end of a scan: -2 and 2 most, 0 not at all.

    A subtree that is being worked on stays at its end, whatever new estimates say; small ones of which a request ran in
    the warm-up come next, at the end they are nearer to.

    Args:
        top: the subtree below the root of each request, in the order of the scan; -1: none.
        last: the subtree that each side works on.
        warm: by subtree, whether the warm-up has computed its prefix.
    """
    place = np.zeros(len(top), np.int64)
    under = top >= 0
    ready = np.flatnonzero(under & warm[top])
    if len(ready):
        number = np.unique(top[ready], return_inverse=True)[1]
        middle = np.bincount(number, ready) / np.bincount(number)
        place[ready] = np.where(middle[number] < len(top) / 2, -1, 1)
    place[under & (top == last[RIGHT])] = 2
    place[under & (top == last[LEFT])] = -2
    return place


def ratio(compute: float, memory: float) -> float:
    """A density; infinite where nothing is read."""
    return float(compute / memory) if memory > 0 else np.inf
