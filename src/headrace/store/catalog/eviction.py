"""Which chunk goes when a tier is full: LRU weighted by the cost of computing again.

GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USITS 1997): a chunk that is used gets

    priority = floor + weight / bytes

and the chunk of lowest priority goes; `floor` then rises to that chunk's priority, so that what is not used again ages.
`weight / bytes` is rounded down to a power of two: costs within a factor of two count as equal, and then the order is
plain LRU. A chunk of unknown weight (found by a scan) counts as the average of those known.

A chunk is useless without the chunks before it, so none may go before those that follow it: touching a chain gives
every chunk at least the priority of those behind it, and of equal ones the deepest counts as the oldest; a chunk that
joins a chain is placed no higher than the chunk before it.

Plain data; time is an argument. Every operation is O(log n) amortised: the heap keeps outdated orders, which only ever
lie below the true ones, and puts them right when they come up.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

#: Priority, time of use (s), minus the depth in its chain, a number that makes it unique; the lowest goes first.
Order = tuple[float, float, int, int]


class Item:
    """A chunk as the policy sees it.

    Attributes:
        key: the chunk's key.
        nbytes: what it takes.
        weight: seconds to compute it again; None when nobody said.
        density: `weight / nbytes`, rounded; below 0 when unknown.
        used_at: last use, seconds of the clock that the caller goes by.
        order: where it stands.
        listed: it takes part.
    """

    __slots__ = ("density", "key", "listed", "nbytes", "order", "used_at", "weight")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.nbytes = 0
        self.weight: float | None = None
        self.density = -1.0
        self.used_at = 0.0
        self.order: Order = (0.0, 0.0, 0, 0)
        self.listed = False


def rounded_density(weight: float, nbytes: int) -> float:
    """Weight per byte, rounded down to a power of two; 0 stays 0."""
    return math.ldexp(1.0, math.frexp(weight / nbytes)[1] - 1) if weight > 0 else 0.0


class EvictionOrder:
    """The order in which items go."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Item]] = []
        self._floor = 0.0
        self._count = 0
        self._numbers = 0
        self._known_weight = 0.0
        self._known_bytes = 0

    def __len__(self) -> int:
        return self._count

    def add(self, item: Item, now: float, after: Item | None = None) -> None:
        """List an item that was not, with its `nbytes` and `weight` set.

        Args:
            item: the new one.
            now: its last use.
            after: the listed item before it in its chain, as far as known.
        """
        self._numbers += 1
        self._weigh(item, 1)
        item.used_at = now
        item.listed = True
        priority = self._floor + self._density(item)
        if after is None:
            item.order = (priority, now, 0, self._numbers)
        else:
            item.order = (min(priority, after.order[0]), min(now, after.order[1]), after.order[2] - 1, self._numbers)
        self._count += 1
        heappush(self._heap, (item.order, item))

    def resize(self, item: Item, nbytes: int, weight: float | None) -> None:
        """A listed item has gained or lost parts; its place changes with its next use."""
        self._weigh(item, -1)
        item.nbytes, item.weight = nbytes, weight
        self._weigh(item, 1)

    def touch(self, chain: Sequence[Item], now: float) -> None:
        """These listed items were used together; `chain` begins with the first chunk of the prefix."""
        floor, typical, top = self._floor, self._typical(), 0.0
        for depth in range(len(chain) - 1, -1, -1):
            item = chain[depth]
            density = item.density
            top = max(top, item.order[0], floor + (density if density >= 0 else typical))
            item.order = (top, now, -depth, item.order[3])
            item.used_at = now

    def remove(self, item: Item) -> None:
        """Unlist an item."""
        item.listed = False
        self._weigh(item, -1)
        self._count -= 1
        if self._count == 0:
            self._known_weight, self._known_bytes = 0.0, 0
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [(item.order, item) for _, item in self._heap if item.listed]
            heapify(self._heap)

    def first(self) -> Item | None:
        """The listed item that goes first; it stays listed."""
        heap = self._heap
        while heap:
            order, item = heap[0]
            if not item.listed:
                heappop(heap)
            elif item.order > order:
                heapreplace(heap, (item.order, item))
            else:
                return item
        return None

    def evicted(self, item: Item) -> None:
        """Some of this item went to make room: the others age."""
        self._floor = max(self._floor, item.order[0])

    def _density(self, item: Item) -> float:
        return item.density if item.density >= 0 else self._typical()

    def _typical(self) -> float:
        """The average of the known ones."""
        if self._known_bytes <= 0 or self._known_weight <= 0:
            return 0.0
        return rounded_density(self._known_weight, self._known_bytes)

    def _weigh(self, item: Item, sign: int) -> None:
        """Count an item into the average (1) or out of it (-1)."""
        if item.weight is None or item.nbytes <= 0:
            item.density = -1.0
            return
        self._known_weight += sign * item.weight
        self._known_bytes += sign * item.nbytes
        item.density = rounded_density(item.weight, item.nbytes)
