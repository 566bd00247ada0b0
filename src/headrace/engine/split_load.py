"""A load whose first chunks may be taken back one by one, because the model computes them sooner."""

from collections.abc import Sequence as Seq

from headrace.store.load import Load


class SplitLoad:
    """Several loads of one sequence as one, see `store.load.Load`; those at the front can be taken back.

    Args:
        loads: each with the number of its chunks, in order of position.
    """

    def __init__(self, loads: Seq[tuple[int, Load]]) -> None:
        self._all = list(loads)
        self.taken = 0

    @property
    def _left(self) -> Seq[tuple[int, Load]]:
        return self._all[self.taken :]

    def take(self) -> bool:
        """Take the first chunk that is left back; when this returns nothing of it is delivered any more.

        Returns:
            False when it is too late, or what is left begins with a load of several chunks.
        """
        if not self._left or self._left[0][0] > 1 or self._left[0][1].done:
            return False
        load = self._left[0][1]
        load.cancel()
        if load.good_chunks:
            return False
        self.taken += 1
        return True

    @property
    def done(self) -> bool:
        """See `Load`."""
        return all(load.done for _, load in self._left)

    @property
    def failed(self) -> bool:
        """See `Load`."""
        return any(load.failed for _, load in self._left)

    @property
    def good_chunks(self) -> int:
        """See `Load`; those taken back count as good."""
        good = self.taken
        for chunks, load in self._left:
            good += load.good_chunks
            if load.good_chunks < chunks:
                break
        return good

    def ready(self, layer: int) -> bool:
        """See `Load`."""
        return all(load.ready(layer) for _, load in self._left)

    def wait(self, layer: int) -> None:
        """See `Load`."""
        for _, load in self._left:
            load.wait(layer)

    def wait_all(self) -> None:
        """See `Load`."""
        for _, load in self._left:
            load.wait_all()

    def cancel(self) -> None:
        """See `Load`."""
        for _, load in reversed(self._left):
            load.cancel()

    def bytes_by_tier(self) -> tuple[int, ...]:
        """See `Load`."""
        return tuple(map(sum, zip(*(load.bytes_by_tier() for _, load in self._left or self._all))))
