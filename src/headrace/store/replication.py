"""Which tiers a new chunk is saved to: a policy that watches reuse, so that work that reuses nothing pays nothing.

What is the paper's (KVStream): a chunk is written in full to every tier, so that a step's reads can be shared between
tiers as they finish; replicating by prefix position is a known variant. It always writes everything, and at 4% reuse
loses to a single tier. What is ours: everything that follows.

Chunks are put into classes by prefix position (0, 1, 2-3, 4-7, ...), because what comes first is reused most. Per
class, over a window of about `WINDOW` offers (exponentially forgotten):

    n = chunks offered        h = hits + ghost hits        r+ = (h + 4) / (n + 8)        r- = h / (n + 8)

A *ghost hit* is a chunk asked for that is not there but was seen before: it would have hit had it been saved and kept.
The list of chunks seen is bounded and holds keys only. r+ is what reuse might be (it begins at one half, so saving
begins at once), r- what it surely is.

Of a chunk of B bytes that takes `weight` seconds to compute again, with tier t reading R_t and writing W_t bytes per
second (both measured) and holding C_t bytes, and a mean distance D between an offer and its reuse, in bytes offered:

    keeps_t   = min(1, C_t / D)              D begins at the largest C_t, at most 4 GiB
    gain of the first tier   = r+ keeps_t (weight - B / R_t)  -  beta B / W_t
    gain of another one u    = r- keeps_u (B / R - B / (R + R_u))  +  r- (1 - keeps) keeps_u (weight - B / R_u)
                               -  beta B / W_u            R, keeps: of the tiers chosen so far, together

The first tier is the one that gains most; others follow in order of gain while they gain and r- is at least
`REPLICATE`. `beta` = `BACKGROUND` is the worth of a second of deferred writing against one of waiting. A class is off,
as are all behind it, when r+ falls below `WORTHLESS` or no tier gains; then one in `SAMPLE` chains is still saved, and
the first ghost hit in the class turns it on again. A chunk that was itself asked for before is saved whatever its
class, and one whose predecessor is known to lie nowhere is not (it could never be reached). A chunk that is found, but
in fewer tiers than its reuse repays, is copied to the others.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headrace.store.part import PartRange
from headrace.store.save import SaveSpec
from headrace.store.settings import Replication

WINDOW = 512
PRIOR_HITS, PRIOR_OFFERS = 4.0, 8.0
EVEN = PRIOR_HITS / PRIOR_OFFERS
WORTHLESS = 0.02
REPLICATE = 0.25
BACKGROUND = 1 / 16
SAMPLE = 32
CLASSES = 12
SEEN = 1 << 15
DISTANCE_PRIOR = float(4 << 30)

Kind = Literal["none", "sample", "one", "some", "all"]


class TierView(NamedTuple):
    """What the policy knows of a tier at a moment.

    Attributes:
        capacity: bytes it may hold.
        read_rate: bytes per second, measured or assumed.
        write_rate: bytes per second, measured or assumed.
        writable: neither degraded nor behind with what it has to write.
    """

    capacity: int
    read_rate: float
    write_rate: float
    writable: bool = True


class Decision(NamedTuple):
    """Tiers to save to, and what to call that."""

    tiers: tuple[int, ...]
    kind: Kind


class Copy(NamedTuple):
    """A chunk that should lie in more tiers than it does."""

    key: bytes
    tiers: tuple[int, ...]


@dataclass(slots=True)
class _Class:
    """Offers and reuses of chunks at similar positions."""

    offers: float = 0.0
    reuses: float = 0.0

    def offer(self) -> None:
        self.offers = self.offers * (1 - 1 / WINDOW) + 1
        self.reuses *= 1 - 1 / WINDOW

    @property
    def hopeful(self) -> float:
        return (self.reuses + PRIOR_HITS) / (self.offers + PRIOR_OFFERS)

    @property
    def sure(self) -> float:
        return self.reuses / (self.offers + PRIOR_OFFERS)


@dataclass(slots=True)
class _Seen:
    """A chunk offered before.

    Attributes:
        tiers: those it went to, as bits.
        range: of the part that was offered first.
        at: when, seconds.
        clock: bytes that had been offered by then.
        wanted: whether it was asked for since.
        sampled: whether it was saved as a sample.
    """

    tiers: int
    range: PartRange
    at: float
    clock: int
    wanted: bool = False
    sampled: bool = False


@dataclass
class ReplicationPolicy:
    """Decides per new chunk. Not for several threads at once; the caller holds a lock.

    Args:
        n_tiers: tiers of the store.
        mode: `auto`, or the same answer always: `all`, `one` (the one that gains most) or `none`.
        horizon: seconds after which a chunk seen is forgotten; 0: never.
    """

    n_tiers: int
    mode: Replication = "auto"
    horizon: float = 0.0
    decisions: Counter[str] = field(default_factory=Counter)
    hits: list[int] = field(default_factory=list)
    ghosts: list[int] = field(default_factory=list)
    ghost_hits: int = 0
    distance: float = 0.0

    def __post_init__(self) -> None:
        self.hits, self.ghosts = [0] * self.n_tiers, [0] * self.n_tiers
        self._classes = [_Class() for _ in range(CLASSES)]
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()
        self._clock = 0  # bytes offered so far
        self._chains = 0  # chains begun while their class was off

    def asked(self, keys: Sequence[bytes], held: Sequence[int], tiers: Sequence[TierView], now: float) -> list[Copy]:
        """A request asked for these chunks.

        Args:
            keys: of its chunks, in order.
            held: for each chunk found, the tiers that hold it, as bits; shorter than `keys` when not all were.
            tiers: as they are.
            now: seconds.

        Returns:
            Chunks found whose reuse repays to have them in more tiers.
        """
        self._assume(tiers)
        copies = []
        for i, key in enumerate(keys):
            seen = self._fresh(key, now)
            have = held[i] if i < len(held) else 0
            if not have and seen is None:
                break
            state = self._classes[_class_of(i)]
            if not have:
                self.ghost_hits += 1
                if not self._worth(i):  # one sign of reuse is enough: begin anew
                    state.offers = state.reuses = 0.0
            state.reuses += 1
            for tier in range(self.n_tiers):
                if have >> tier & 1:
                    self.hits[tier] += 1
                elif seen is not None:
                    self.ghosts[tier] += 1
            if seen is not None:
                seen.wanted = True
                self.distance += 0.1 * ((self._clock - seen.clock) - self.distance)
            if have and self.mode == "auto":
                copies += self._copies(key, have, seen, state, tiers, now)
        return copies

    def decide(self, spec: SaveSpec, nbytes: int, tiers: Sequence[TierView], now: float) -> Decision:
        """Tiers to save a part to, cheapest first.

        Args:
            spec: the part.
            nbytes: its size.
            tiers: as they are.
            now: seconds.
        """
        self._assume(tiers)
        key = spec.part.key
        seen = self._fresh(key, now)
        if seen is not None and seen.range != spec.part.range and not seen.wanted:  # another part of the same chunk
            chosen = tuple(t for t in range(self.n_tiers) if seen.tiers >> t & 1 and tiers[t].writable)
            return self._count(Decision(chosen, self._kind(chosen)))
        self._clock += nbytes
        state = self._classes[_class_of(spec.chunk)]
        state.offer()
        decision = self._choose(spec, nbytes, tiers, state, seen is not None, now)
        bits = sum(1 << t for t in decision.tiers)
        self._seen[key] = _Seen(bits, spec.part.range, now, self._clock, sampled=decision.kind == "sample")
        self._seen.move_to_end(key)
        while len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return self._count(decision)

    def expects(
        self,
        keys: Sequence[bytes],
        first: int,
        weight: float,
        nbytes: int,
        tiers: Sequence[TierView],
        now: float,
    ) -> int:
        """How many new chunks, from the first, would be saved if they were offered now. Changes nothing.

        Samples are left out: nobody is to wait for one.

        Args:
            keys: of the chunks, in order.
            first: number of the first of them in its prefix.
            weight: seconds it takes to compute one of them again.
            nbytes: size of each.
            tiers: as they are.
            now: seconds.
        """
        writable = [t for t in range(self.n_tiers) if tiers[t].writable]
        if self.mode == "none" or not writable:
            return 0
        if self.mode != "auto":
            return len(keys)
        for i, key in enumerate(keys):
            seen = self._seen.get(key)
            again = seen is not None and not (self.horizon and now - seen.at > self.horizon)
            state = self._classes[_class_of(first + i)]
            gains = self._first_gains(weight, nbytes, tiers, writable, state, again)
            best = max(writable, key=gains.__getitem__)
            if not self._pays(weight, nbytes, tiers[best], state):
                return i
            if not again and (gains[best] <= 0 or not self._worth(first + i)):
                return i
        return len(keys)

    def lost(self, key: bytes) -> None:
        """A chunk that was to be saved reached no tier."""
        seen = self._seen.get(key)
        if seen is not None:
            seen.tiers = 0

    def _choose(
        self, spec: SaveSpec, nbytes: int, tiers: Sequence[TierView], state: _Class, again: bool, now: float
    ) -> Decision:
        writable = [t for t in range(self.n_tiers) if tiers[t].writable]
        if self.mode == "none" or not writable:
            return Decision((), "none")
        if self.mode == "all":
            return Decision(tuple(writable), self._kind(writable))
        gains = self._first_gains(spec.weight, nbytes, tiers, writable, state, again)
        first = max(writable, key=gains.__getitem__)
        if self.mode == "one":
            return Decision((first,), "one")
        parent = self._fresh(spec.parent, now) if spec.parent is not None else None
        if parent is not None and not parent.tiers:
            return Decision((), "none")
        if not self._pays(spec.weight, nbytes, tiers[first], state):
            return Decision((), "none")  # as quick to compute as to load
        if not again and (gains[first] <= 0 or not self._worth(spec.chunk)):
            sampled = parent is not None and parent.sampled
            if not sampled and (spec.chunk == 0 or parent is not None):  # here begins what is not worth it
                self._chains += 1
                sampled = self._chains % SAMPLE == 0
            return Decision((first,), "sample") if sampled else Decision((), "none")
        chosen = self._more((first,), state.sure, spec.weight, nbytes, tiers)
        return Decision(chosen, self._kind(chosen))

    def _first_gains(
        self,
        weight: float,
        nbytes: int,
        tiers: Sequence[TierView],
        writable: Sequence[int],
        state: _Class,
        again: bool,
    ) -> dict[int, float]:
        hope = max(state.hopeful, EVEN) if again else state.hopeful
        return {t: self._first_gain(hope, weight, nbytes, tiers[t]) for t in writable}

    def _pays(self, weight: float, nbytes: int, tier: TierView, state: _Class) -> bool:
        """False where a chunk is as quick to compute as to load, however often it is asked for."""
        return self._first_gain(max(state.hopeful, EVEN), weight, nbytes, tier) > 0

    def _first_gain(self, reuse: float, weight: float, nbytes: int, tier: TierView) -> float:
        saved = max(0.0, weight - nbytes / tier.read_rate)
        return reuse * self._keeps(tier) * saved - BACKGROUND * nbytes / tier.write_rate

    def _more(
        self, chosen: tuple[int, ...], reuse: float, weight: float, nbytes: int, tiers: Sequence[TierView]
    ) -> tuple[int, ...]:
        """Add tiers while they gain."""
        while reuse >= REPLICATE:
            rate = sum(tiers[t].read_rate for t in chosen)
            lost = 1.0
            for t in chosen:
                lost *= 1 - self._keeps(tiers[t])
            gains = {}
            for u in range(self.n_tiers):
                if u not in chosen and tiers[u].writable:
                    keeps = reuse * self._keeps(tiers[u])
                    faster = nbytes / rate - nbytes / (rate + tiers[u].read_rate)
                    safer = lost * max(0.0, weight - nbytes / tiers[u].read_rate)
                    gains[u] = keeps * (faster + safer) - BACKGROUND * nbytes / tiers[u].write_rate
            best = max(gains, key=gains.__getitem__, default=None)
            if best is None or gains[best] <= 0:
                break
            chosen = (*chosen, best)
        return chosen

    def _copies(
        self, key: bytes, have: int, seen: _Seen | None, state: _Class, tiers: Sequence[TierView], now: float
    ) -> list[Copy]:
        """A chunk found that should lie in more tiers. The weight is not known here: only faster reads count."""
        held = tuple(t for t in range(self.n_tiers) if have >> t & 1)
        more = self._more(held, state.sure, 0.0, 1, tiers)[len(held) :]
        if seen is not None:  # went there before and was evicted: only once what it held has changed
            turned = self._clock - seen.clock
            more = tuple(t for t in more if not seen.tiers >> t & 1 or turned >= tiers[t].capacity)
            seen.tiers |= sum(1 << t for t in more)
        elif more:
            bits = have | sum(1 << t for t in more)
            self._seen[key] = _Seen(bits, PartRange(0, 0, 0, 0), now, self._clock, wanted=True)
        return [Copy(key, more)] if more else []

    def _worth(self, chunk: int) -> bool:
        """True when chunks up to this position show any reuse to speak of."""
        return all(state.hopeful >= WORTHLESS for state in self._classes[: _class_of(chunk) + 1])

    def _keeps(self, tier: TierView) -> float:
        return min(1.0, tier.capacity / max(1.0, self.distance))

    def _assume(self, tiers: Sequence[TierView]) -> None:
        """Before any reuse was seen: that the largest tier keeps what is saved until it is asked for."""
        if not self.distance:
            self.distance = min(DISTANCE_PRIOR, max(tier.capacity for tier in tiers))

    def _fresh(self, key: bytes, now: float) -> _Seen | None:
        seen = self._seen.get(key)
        if seen is not None and self.horizon and now - seen.at > self.horizon:
            del self._seen[key]
            return None
        return seen

    def _kind(self, chosen: Sequence[int]) -> Kind:
        if not chosen:
            return "none"
        if len(chosen) == 1:
            return "one"
        return "all" if len(chosen) == self.n_tiers else "some"

    def _count(self, decision: Decision) -> Decision:
        self.decisions[decision.kind] += 1
        return decision


def _class_of(chunk: int) -> int:
    return min(chunk.bit_length(), CLASSES - 1)
