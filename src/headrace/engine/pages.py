"""Which pages are free, held or cached. Plain data: no KV here."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.engine.prefix_index import PrefixIndex


class OutOfPages(Exception):
    """The pool has no page to give; the scheduler preempts or waits."""


class PageAllocator:
    """Reference-counted pages `0..pages-1` with least-recently-used reuse of cached ones.

    A page is *held* (count > 0), *cached* (count 0, but its content is in the prefix index) or *free*. Cached pages
    are given out again, oldest first, when no free one is left. `release` takes a sequence's pages tail first, so of
    one prefix the leaf always goes before its parent.
    """

    def __init__(self, pages: int, index: PrefixIndex) -> None:
        self._index = index
        self._count = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def total(self) -> int:
        """Pages of the pool."""
        return len(self._count)

    @property
    def available(self) -> int:
        """Pages that `allocate` could give."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Pages held by sequences."""
        return self.total - self.available

    def holders(self, page: int) -> int:
        """References to a page."""
        return self._count[page]

    def allocate(self, n: int) -> list[int]:
        """Take n pages, all or none.

        Raises:
            OutOfPages: fewer than n are available.
        """
        if n > self.available:
            raise OutOfPages(f"{n} pages wanted, {self.available} of {self.total} available")
        pages = []
        for _ in range(n):
            if self._free:
                page = self._free.pop()
            else:
                page, _none = self._cached.popitem(last=False)
                self._index.evict(page)
            self._count[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add a reference to pages found in the index."""
        for page in pages:
            if self._count[page] == 0:
                del self._cached[page]
            self._count[page] += 1

    def fresh_if_held(self, pages: Iterable[int]) -> int:
        """How many of these pages are cached now, that is: leave `available` when held."""
        return sum(1 for page in pages if self._count[page] == 0)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page, tail first."""
        for page in reversed(pages):
            if self._count[page] <= 0:
                raise AssertionError(f"page {page} released more often than held")
            self._count[page] -= 1
            if self._count[page] == 0:
                if page in self._index:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def grow(self, total: int) -> None:
        """Raise the number of pages."""
        old = self.total
        self._count.extend([0] * (total - old))
        self._free[:0] = range(total - 1, old - 1, -1)

    def shrink(self, total: int) -> list[tuple[int, int]]:
        """Lower the number of pages; returns `(source, target)` moves the caller must carry out on the KV.

        Free and cached pages above the new end go; held ones move below it.

        Raises:
            OutOfPages: more pages are held than would remain; nothing is changed.
        """
        if self.used > total:
            raise OutOfPages(f"{self.used} pages are in use, cannot shrink to {total}")
        for page in [page for page in self._cached if page >= total]:
            del self._cached[page]
            self._index.evict(page)
        self._free = [page for page in self._free if page < total]
        moves = []
        for source in range(total, self.total):
            if self._count[source]:
                target = self.allocate(1)[0]
                self._count[target] = self._count[source]
                self._index.move(source, target)
                moves.append((source, target))
        del self._count[total:]
        return moves

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless counts equal the references in `held` and every page is in one place."""
        counts = [0] * self.total
        for pages in held:
            for page in pages:
                counts[page] += 1
        if counts != self._count:
            wrong = [page for page in range(self.total) if counts[page] != self._count[page]]
            raise AssertionError(f"pages with wrong counts: {wrong[:10]}")
        places = sorted([*self._free, *self._cached, *(p for p in range(self.total) if counts[p])])
        if places != list(range(self.total)):
            raise AssertionError("a page is lost or in two places")
