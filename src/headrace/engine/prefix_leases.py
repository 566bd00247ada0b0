"""Chunks that one engine computes for all: what this engine's sequences have leased, and what they wait for.

An admitted sequence leases the full chunks that it will compute and that the store would save; others that want them
wait. Where the next one is another engine's, the sequence gets a *fence*: plans go no further. It keeps its pages,
loads what has come, and looks again, until it holds the lease of what is missing or has waited long enough
(`lease_wait`). It never waits for chunks that its own store would not save: where nothing is worth saving, nobody is
asked.

A lease ends when its chunk was offered to the store (or with that save, see `store.lease_book`), and when the sequence
gives up its pages.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.engine.lease_wait import LOOK_SECONDS, LOOKS, patience
from headrace.engine.sequence import Sequence
from headrace.store.load import FoundChunk
from headrace.store.part import PartRange


class LeaseStore(Protocol):
    """What leasing needs of the KV store."""

    def lookup(self, keys: Seq[bytes], wanted: PartRange, count: bool = True) -> list[FoundChunk]:
        """See `store.store.KVStore.lookup`."""
        ...

    def would_save(self, keys: Seq[bytes], first: int, weight: float, wanted: PartRange) -> int:
        """See `store.store.KVStore.would_save`."""
        ...

    def lease(self, keys: Seq[bytes]) -> int:
        """See `store.store.KVStore.lease`."""
        ...

    def renew(self) -> None:
        """See `store.store.KVStore.renew`."""
        ...

    def release(self, keys: Seq[bytes]) -> None:
        """See `store.store.KVStore.release`."""
        ...


class Look(NamedTuple):
    """What a sequence that waited found.

    Attributes:
        seq: whose.
        first: number of the chunk with its next token.
        found: what the store has from there on.
        fence: the token that plans may go up to now; None: all.
    """

    seq: Sequence
    first: int
    found: list[FoundChunk]
    fence: int | None


@dataclass(slots=True)
class _Claim:
    """Chunks `[first, end)` of a sequence are leased for it, and neither offered to the store nor given up."""

    keys: Seq[bytes]
    first: int
    end: int


@dataclass(slots=True)
class _Wait:
    """A sequence with a fence.

    Attributes:
        seq: whose.
        keys: of its full chunks.
        since: when it came to the fence; None while it has something to do before it.
        until: when it will have waited long enough.
    """

    seq: Sequence
    keys: Seq[bytes]
    since: float | None = None
    until: float | None = None


class PrefixLeases:
    """Leases and waits of an engine. Belongs to the thread of the step loop.

    Args:
        store: asked.
        wanted: layers and heads of the engine.
        chunk_tokens: tokens of a stored chunk.
        compute_time: seconds it takes to compute so many tokens from a position on.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        store: LeaseStore,
        wanted: PartRange,
        chunk_tokens: int,
        compute_time: Callable[[int, int], float],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._wanted, self._size = store, wanted, chunk_tokens
        self._compute_time, self._clock = compute_time, clock
        self._claims: dict[str, _Claim] = {}
        self._waits: dict[str, _Wait] = {}  # the one that was looked after last at the end
        self._look_at = float("-inf")
        self.waits = 0
        self.waited = 0.0
        self.given_up = 0

    @property
    def waiting(self) -> bool:
        """True while a sequence has a fence."""
        return bool(self._waits)

    def claim(self, seq: Sequence, keys: Seq[bytes], known: int, fresh: bool) -> int | None:
        """A sequence is admitted and will compute what is missing.

        Args:
            seq: whose.
            keys: of its full chunks.
            known: tokens that are in the pool or will be loaded.
            fresh: the store was asked for its chunks just now.

        Returns:
            The token that plans may go up to; None: all.
        """
        first = known // self._size
        expected, count = self._lease(keys, first)
        if not expected:
            return None
        loadable = self._loadable(seq)
        if count and not fresh and self._store.lookup(keys[first:loadable], self._wanted, False):
            self._store.release(keys[first : first + count])  # it was computed while the sequence queued: load it
            self._waits[seq.id] = _Wait(seq, keys)
            return known
        self._hold(seq, keys, first, first + count)
        if count == expected or first + count >= loadable:
            return None
        self._waits[seq.id] = _Wait(seq, keys)
        return max(known, (first + count) * self._size)

    def look(self) -> list[Look]:
        """Look whether something has come for sequences that wait; those whose fence moved."""
        now = self._clock()
        if not self._waits or now < self._look_at:
            return []
        found = []
        looked = 0
        for wait in list(self._waits.values()):
            seq = wait.seq
            if seq.loading or seq.in_flight or seq.plannable:
                continue
            if wait.since is None:
                wait.since = now
                if wait.until is None:
                    self.waits += 1
                    missing = self._loadable(seq) * self._size - seq.computed
                    wait.until = now + patience(self._compute_time(seq.computed, missing))
            if looked == LOOKS:
                break
            looked += 1
            self._look_at = now + LOOK_SECONDS
            self._waits[seq.id] = self._waits.pop(seq.id)
            look = self._look(wait, now)
            if look is not None:
                found.append(look)
                self.waited += now - wait.since
                wait.since = None
                if look.fence is None:
                    del self._waits[seq.id]
        return found

    def offered(self, seq_id: str, end: int) -> None:
        """A sequence's chunks before number `end` were offered to the store: no more to be done for them."""
        claim = self._claims.get(seq_id)
        if claim is None or end <= claim.first:
            return
        done = min(end, claim.end)
        self._store.release(claim.keys[claim.first : done])  # such as were never offered, or refused
        claim.first = done
        if done == claim.end:
            del self._claims[seq_id]

    def leave(self, seq_id: str) -> None:
        """A sequence has ended or was preempted."""
        claim = self._claims.pop(seq_id, None)
        if claim is not None:
            self._store.release(claim.keys[claim.first : claim.end])
        wait = self._waits.pop(seq_id, None)
        if wait is not None and wait.since is not None:
            self.waited += self._clock() - wait.since

    def renew(self) -> None:
        """Between steps: see to it that leases outlast a long prompt."""
        if self._claims:
            self._store.renew()

    def check(self, running: Seq[Sequence]) -> None:
        """Raise AssertionError unless leases and fences are those of sequences that hold pages."""
        fenced = {seq.id for seq in running if seq.fence is not None}
        if fenced != self._waits.keys():
            raise AssertionError(f"fenced are {sorted(fenced)}, waiting {sorted(self._waits)}")
        if not self._claims.keys() <= {seq.id for seq in running}:
            raise AssertionError("leases of sequences are kept that hold no pages")

    def _loadable(self, seq: Sequence) -> int:
        """Chunks that could be loaded: at least the last token is computed."""
        return (seq.length - 1) // self._size

    def _lease(self, keys: Seq[bytes], first: int) -> tuple[int, int]:
        """Lease chunks from number `first` on; how many were wanted and how many are this engine's."""
        missing = keys[first:]
        if not missing:
            return 0, 0
        weight = self._compute_time(first * self._size, self._size)
        expected = self._store.would_save(missing, first, weight, self._wanted)
        return expected, self._store.lease(missing[:expected]) if expected else 0

    def _hold(self, seq: Sequence, keys: Seq[bytes], first: int, end: int) -> None:
        if first < end:
            self._claims[seq.id] = _Claim(keys, first, end)

    def _look(self, wait: _Wait, now: float) -> Look | None:
        """Leases are asked for before chunks: whoever got one that has just ended finds what it was for."""
        seq, keys = wait.seq, wait.keys
        first, loadable = seq.computed // self._size, self._loadable(seq)
        expected, count = self._lease(keys, first)
        found = self._store.lookup(keys[first:loadable], self._wanted, False)
        come = len(found)
        if not come and not count and expected:
            if wait.until is not None and now < wait.until:
                return None
            self.given_up += 1
            return Look(seq, first, [], None)
        self._store.release(keys[first : first + min(come, count)])
        mine = max(come, count)
        self._hold(seq, keys, first + come, first + mine)
        more = first + mine < loadable and count < expected
        return Look(seq, first, found, (first + mine) * self._size if more else None)


__all__ = ["LeaseStore", "Look", "PrefixLeases"]
