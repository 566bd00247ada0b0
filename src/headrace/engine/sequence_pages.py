"""Pages for sequences: a known prefix shared, the rest taken, all given back in one place. Plain data."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from headrace.engine.pages import PageAllocator
from headrace.engine.prefix_index import PageHasher, PrefixIndex
from headrace.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the index knows of a sequence's tokens.

    Attributes:
        pages: pages of the longest known prefix; held by nobody yet, so valid until the next allocation.
        missing: keys of the full pages after it.
        owner: the running sequence that will compute the next of them, if any.
    """

    pages: list[int]
    missing: list[bytes]
    owner: Sequence | None = None


NOTHING = PrefixMatch([], [])


class SequencePages:
    """The page pool as sequences see it.

    Contract: `take` and `give_back` pair up; `grow` and `enter` in between. `lend` and `end_loan` pair up for whoever
    reads pages longer than their sequence keeps them.

    Args:
        allocator: the pool's pages.
        index: which pages hold which prefixes.
        hasher: keys of pages.
        page_size: tokens per page.
        caching: enter and look up prefixes at all.
    """

    def __init__(
        self, allocator: PageAllocator, index: PrefixIndex, hasher: PageHasher, page_size: int, caching: bool = True
    ) -> None:
        self._allocator = allocator
        self._index = index
        self._hasher = hasher
        self._page_size = page_size
        self._caching = caching
        self._lent: list[Seq[int]] = []
        self._copies: dict[int, int] = {}

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        return self._allocator.available

    def match(self, seq: Sequence) -> PrefixMatch:
        """Look a sequence's prefix up; at least its last token is left to compute.

        A sequence that wants prompt log-probabilities computes everything: they come from the forward pass.
        """
        if not self._caching or seq.request.params.prompt_logprobs is not None:
            return NOTHING
        keys = self._hasher.extend(seq, seq.length // self._page_size)
        usable = (seq.length - 1) // self._page_size
        pages = self._index.match(keys, usable)
        missing = keys[len(pages) :]
        owner = self._index.pending_owner(missing[0]) if len(pages) < usable else None
        return PrefixMatch(pages, missing, owner)

    def wanted(self, seq: Sequence, match: PrefixMatch) -> int:
        """How many available pages `take` would use up: all known tokens and the next one have room."""
        shared = self._allocator.fresh_if_held(match.pages)
        return self._pages_for(seq.length + 1) - len(match.pages) + shared

    def take(self, seq: Sequence, match: PrefixMatch) -> None:
        """Give a waiting sequence its shared prefix and pages for the rest, and announce what it will compute.

        Raises:
            OutOfPages: fewer than `wanted` are available; nothing is changed.
        """
        self._allocator.hold(match.pages)
        seq.pages = match.pages + self._allocator.allocate(self._pages_for(seq.length + 1) - len(match.pages))
        seq.computed = seq.scheduled = len(match.pages) * self._page_size
        seq.indexed = len(match.pages)
        self._index.announce(seq, match.missing)

    def borrow(self, seq: Sequence) -> int:
        """Let a sequence that was just given its pages begin in the middle of one: its tokens go on for a while as
        those of a complete page do. That page's KV has to be copied (`take_copies`) before anything is computed.

        Returns:
            Tokens that need no computation by that.
        """
        if not self._caching or seq.request.params.prompt_logprobs is not None:
            return 0
        page = seq.computed // self._page_size
        rest = seq.tokens[seq.computed : min(seq.computed + self._page_size, seq.length - 1)]
        source, count = self._index.nearest(self._hasher.before(seq, page), rest)
        if count:
            self._copies[seq.pages[page]] = source
            seq.computed = seq.scheduled = seq.computed + count
        return count

    def take_copies(self) -> list[tuple[int, int]]:
        """Page copies `(source, target)` that `borrow` promised since the last call.

        They are to be carried out at once, all sources being read before any target is written: what happens to the
        pool afterwards may give the sources to others.
        """
        copies, self._copies = self._copies, {}
        return [(source, target) for target, source in copies.items()]

    def lacks(self, seq: Sequence, tokens: int) -> int:
        """Pages a sequence needs in addition for so many tokens."""
        return max(0, self._pages_for(tokens) - len(seq.pages))

    def grow(self, seq: Sequence, tokens: int) -> None:
        """Give a sequence pages for so many tokens.

        Raises:
            OutOfPages: fewer than `lacks` are available; nothing is changed.
        """
        seq.pages += self._allocator.allocate(self.lacks(seq, tokens))

    def enter(self, seq: Sequence) -> None:
        """Enter the pages into the index that are complete now."""
        if not self._caching:
            return
        complete = seq.computed // self._page_size
        keys = self._hasher.extend(seq, complete)
        for page in range(seq.indexed, complete):
            tokens = seq.tokens[page * self._page_size : (page + 1) * self._page_size]
            self._index.insert(keys[page], seq.pages[page], self._hasher.before(seq, page), tokens)
        seq.indexed = complete

    def give_back(self, seq: Sequence) -> None:
        """Release all pages of a sequence and withdraw what it announced."""
        self._index.withdraw(seq)
        self._allocator.release(seq.pages)
        seq.pages = []

    @property
    def lent(self) -> int:
        """Pages on loan, counted once per loan."""
        return sum(len(pages) for pages in self._lent)

    @property
    def used(self) -> int:
        """Pages that sequences hold; those that only loans keep are left out."""
        loans = Counter(page for pages in self._lent for page in pages)
        return self._allocator.used - sum(self._allocator.holders(page) == count for page, count in loans.items())

    @property
    def total(self) -> int:
        """Pages of the pool."""
        return self._allocator.total

    def lend(self, pages: Seq[int]) -> None:
        """Keep pages that somebody holds as they are until `end_loan`, whoever gives them back meanwhile."""
        self._allocator.hold(pages)
        self._lent.append(pages)

    def end_loan(self, pages: Seq[int]) -> None:
        """The list given to `lend` is not needed any more."""
        self._lent.remove(pages)
        self._allocator.release(pages)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the pool's counts are those of these sequences' pages and the loans."""
        held = list(sequences)
        self._allocator.check([*(seq.pages for seq in held), *self._lent])
        for seq in held:
            if len(seq.pages) * self._page_size < seq.scheduled:
                raise AssertionError(f"{seq.id}: {len(seq.pages)} pages for {seq.scheduled} tokens")

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
