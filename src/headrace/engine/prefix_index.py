"""Which pages hold which prefixes: a hash chain over token ids."""

from hashlib import blake2b
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sequence import Sequence

KEY_BYTES = 16
#: Pages that are compared with what goes on from a prefix: the newest ones that begin with the same token.
CANDIDATES = 8


class PageHasher:
    """Keys of full pages: `key[i] = H(key[i-1] || tokens of page i)`, `key[-1] = H(fingerprint, salt)`.

    The hash is a cryptographic one (BLAKE2b), so equal keys mean equal prefixes even for crafted prompts; bytes are
    little-endian int32, so that keys are the same in every process and run.
    """

    def __init__(self, fingerprint: str, page_size: int) -> None:
        self._fingerprint = fingerprint.encode()
        self._page_size = page_size

    def root(self, salt: str) -> bytes:
        """The key before the first page. Another salt shares nothing."""
        digest = blake2b(digest_size=KEY_BYTES, person=b"headrace-pages")
        digest.update(len(self._fingerprint).to_bytes(4, "little"))
        digest.update(self._fingerprint)
        digest.update(salt.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def before(self, seq: Sequence, page: int) -> bytes:
        """The key of what comes before a page of a sequence whose keys are known so far."""
        return seq.hashes[page - 1] if page else self.root(seq.request.cache_salt)

    def extend(self, seq: Sequence, pages: int) -> list[bytes]:
        """Make sure the first `pages` keys of a sequence are known, and return its list of keys."""
        keys = seq.hashes
        if len(keys) < pages:
            size = self._page_size
            key = keys[-1] if keys else self.root(seq.request.cache_salt)
            tokens: NDArray[np.int32] = seq.tokens.astype("<i4", copy=False)
            for page in range(len(keys), pages):
                key = blake2b(key + tokens[page * size : (page + 1) * size].tobytes(), digest_size=KEY_BYTES).digest()
                keys.append(key)
        return keys


class PrefixIndex:
    """Keys of pages in the pool, and of pages that a running sequence is about to compute.

    Reading never changes reference counts; the caller holds the pages it found (`PageAllocator.hold`) before it
    allocates any, or they may be evicted.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._pending: dict[bytes, Sequence] = {}
        # What goes on from a prefix: by the key of the prefix and the first token, the tokens of pages, newest last.
        self._next: dict[tuple[bytes, int], dict[int, NDArray[np.int32]]] = {}
        self._place: dict[int, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def match(self, keys: list[bytes], limit: int) -> list[int]:
        """Pages of the longest known prefix, at most `limit`."""
        pages: list[int] = []
        for key in keys[:limit]:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def pending_owner(self, key: bytes) -> Sequence | None:
        """The running sequence that will compute the page with this key, if any."""
        return self._pending.get(key)

    def announce(self, seq: Sequence, keys: list[bytes]) -> None:
        """`seq` is going to compute the pages with these keys."""
        for key in keys:
            self._pending.setdefault(key, seq)

    def withdraw(self, seq: Sequence) -> None:
        """`seq` will compute nothing more (it finished, was aborted or preempted)."""
        for key in seq.hashes:
            if self._pending.get(key) is seq:
                del self._pending[key]

    def insert(self, key: bytes, page: int, before: bytes, tokens: NDArray[np.int32]) -> None:
        """A page is complete. The first page with a key stays; a later equal one remains private to its sequence.

        Args:
            key: of the prefix that ends with the page.
            page: its number.
            before: key of the prefix before it.
            tokens: of the page; copied.
        """
        self._pending.pop(key, None)
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key
            place = before, int(tokens[0])
            self._next.setdefault(place, {})[page] = tokens.copy()
            self._place[page] = place

    def nearest(self, before: bytes, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """A page that goes on from a prefix as `tokens` do, and for how many of them; (-1, 0) where there is none.

        Args:
            before: key of the prefix.
            tokens: what comes after it, no more than a page.
        """
        best, most = -1, 0
        known = self._next.get((before, int(tokens[0]))) if len(tokens) else None
        for page, others in islice(reversed(known.items()), CANDIDATES) if known is not None else ():
            differs = tokens != others[: len(tokens)]
            common = int(differs.argmax()) if differs.any() else len(tokens)
            if common > most:
                best, most = page, common
        return best, most

    def evict(self, page: int) -> None:
        """A page's content is about to go."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
            self._leave(page)

    def move(self, source: int, target: int) -> None:
        """A page's content now lies in another page."""
        key = self._key_of.pop(source, None)
        if key is not None:
            self._key_of[target] = key
            self._page_of[key] = target
            place = self._place[source]
            tokens = self._leave(source)
            self._next.setdefault(place, {})[target] = tokens
            self._place[target] = place

    def _leave(self, page: int) -> NDArray[np.int32]:
        place = self._place.pop(page)
        known = self._next[place]
        tokens = known.pop(page)
        if not known:
            del self._next[place]
        return tokens
