"""The queue of sequences that hold no pages, in order of service."""

from bisect import insort
from collections.abc import Iterator
from itertools import islice

from headrace.engine.sequence import Sequence


class WaitingQueue:
    """Online and offline sequences, each sorted by priority and arrival (a preempted one regains its old place)."""

    def __init__(self) -> None:
        self._queues: dict[bool, list[Sequence]] = {True: [], False: []}

    def __len__(self) -> int:
        return len(self._queues[True]) + len(self._queues[False])

    @property
    def online(self) -> bool:
        """True when an online sequence waits."""
        return bool(self._queues[True])

    def push(self, seq: Sequence) -> None:
        """Insert at its place."""
        queue = self._queues[seq.online]
        if not queue or queue[-1].rank < seq.rank:
            queue.append(seq)
        else:
            insort(queue, seq, key=lambda s: s.rank)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out.

        Raises:
            ValueError: it is not in the queue.
        """
        self._queues[seq.online].remove(seq)

    def candidates(self, online: bool, most: int) -> Iterator[Sequence]:
        """The first sequences of a class; the queue may change while they are gone through."""
        return iter(list(islice(self._queues[online], most)))
