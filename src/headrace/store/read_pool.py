"""Which tier reads what next: the common pool of all units of all loads. Pure policy: no I/O, no threads, no clock.

Rules (DESIGN 4):
1. Nothing is assigned beforehand. A tier that has a read to spare takes the first unit that it holds.
2. Batches (steps) come one after another, within a batch early layers of all loads come before later ones of any; a
   batch that a running step waits for (`hasten`) comes before the others.
3. Within a batch, units that fewer tiers hold come first: others can do the rest.
4. A tier that finds the pool dry re-issues the slowest outstanding unit that it holds, if it expects to be done earlier
   (a hedge); the first completion wins. A read that has stalled is re-issued although the pool is not dry.
5. After an error a unit goes to another holder; it is lost when there is none. A tier that fails repeatedly is paused.

There is a heap of rows per set of holders, a row being the pending units of one place in one batch. What was taken back
or moved stays in its row and is passed over when it comes up. So the cost of a unit does not depend on what is pending.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Generic

from headrace.store.read_unit import Attempt, Outcome, Rank, ReadUnit, State, Verdict, What
from headrace.store.tier_speed import TierHealth, TierSpeed

#: A read that takes this many times as long as expected, and this much longer, has stalled.
STALL_FACTOR = 4.0
STALL_SECONDS = 0.05


class ReadPool(Generic[What]):
    """The completion-driven pool; `read_policies` has others for comparison.

    Args:
        depths: reads in flight per tier.
        hedge: whether outstanding units are re-issued.
    """

    def __init__(self, depths: Sequence[int], hedge: bool = True) -> None:
        self._depths = tuple(depths)
        self._hedging = hedge
        self._everyone = (1 << len(depths)) - 1
        self._paused = 0
        self._outstanding = [0] * len(depths)
        self._heaps: dict[int, list[tuple[Rank, deque[ReadUnit[What]]]]] = {}
        self._owners: dict[int, list[ReadUnit[What]]] = {}
        self._left: dict[int, int] = {}
        self._attempts: dict[Attempt[What], None] = {}
        self._watched: deque[Attempt[What]] = deque()
        self._lost: list[ReadUnit[What]] = []
        self._batch = 0
        self._rows = 0
        self.speeds = tuple(TierSpeed() for _ in depths)
        self.health = tuple(TierHealth() for _ in depths)
        self.hedges = 0

    @property
    def unfinished(self) -> int:
        """Units neither won nor lost nor cancelled."""
        return sum(self._left.values())

    def owned(self) -> list[ReadUnit[What]]:
        """The units of owners who have unfinished ones."""
        return [unit for units in self._owners.values() for unit in units]

    @property
    def busy(self) -> bool:
        """True while some unit is unfinished."""
        return bool(self._left)

    def outstanding(self, tier: int) -> int:
        """Attempts that a tier has."""
        return self._outstanding[tier]

    def add(self, units: Sequence[ReadUnit[What]], now: float) -> None:
        """Put the units of a step in: one batch. What no tier can read now is lost at once, see `pop_lost`."""
        self._batch += 1
        for tier in range(len(self._depths)):
            self._unpause(tier, now)
        first = (self._batch, 0, 0)
        for owner, group in groupby(units, attrgetter("owner")):
            own = list(group)
            self._owners.setdefault(owner, []).extend(own)
            self._left[owner] = self._left.get(owner, 0) + len(own)
            for unit in own:
                unit.rank = first
        self._admit(units)

    def take(self, tier: int, now: float) -> Attempt[What] | None:
        """What the tier should read now; None when there is nothing, or it has enough to do, or is paused."""
        self._unpause(tier, now)
        if self._outstanding[tier] >= self._depths[tier] or self._paused >> tier & 1:
            return None
        if self._outstanding[tier] and self.health[tier].on_probation:
            return None
        unit = self._stalled(tier, now) if self._hedging else None
        hedge = unit is not None
        if unit is None:
            unit = self._next(tier)
        if unit is None and self._hedging:
            unit = self._slowest(tier, now)
            hedge = unit is not None
        if unit is None:
            return None
        attempt = Attempt(unit, tier, now, self.speeds[tier].expected(unit.nbytes), hedge)
        unit.state = State.READING
        if unit.attempts is None:
            unit.attempts = [attempt]
        else:
            unit.attempts.append(attempt)
        self._attempts[attempt] = None
        self._outstanding[tier] += 1
        self.hedges += hedge
        if self._hedging and not hedge and unit.holders & (unit.holders - 1):
            self._watched.append(attempt)
        return attempt

    def finish(self, attempt: Attempt[What], outcome: Outcome, now: float) -> Verdict:
        """An attempt is over.

        Returns:
            `WON` for exactly one attempt of a unit; `LATE` when the unit was won or cancelled before; `RETRY` when the
            unit waits for another tier or another attempt goes on; `LOST` when no tier is left.
        """
        unit, tier = attempt.unit, attempt.tier
        attempt.over = True
        del self._attempts[attempt]
        self._outstanding[tier] -= 1
        assert unit.attempts is not None
        unit.attempts.remove(attempt)
        if outcome is Outcome.ERROR:
            if self.health[tier].failed(now):
                self._pause(tier)
        else:
            self.health[tier].succeeded()
        if outcome in (Outcome.OK, Outcome.LATE):
            self.speeds[tier].observe(unit.nbytes, now - attempt.started)
        if unit.state is not State.READING or outcome is Outcome.LATE:
            return Verdict.LATE
        if outcome is Outcome.OK:
            self._end(unit, State.WON)
            return Verdict.WON
        unit.failed |= 1 << tier
        if unit.attempts:
            return Verdict.RETRY
        if not unit.holders & ~unit.failed & ~self._paused:
            self._end(unit, State.LOST)
            return Verdict.LOST
        self._queue(unit)
        return Verdict.RETRY

    def cancel(self, owner: int) -> None:
        """Nobody wants the owner's units any more: pending ones go, attempts under way will end as `LATE`."""
        self.cancel_units(self._owners.get(owner, ()))

    def cancel_units(self, units: Sequence[ReadUnit[What]]) -> None:
        """The same for some units."""
        for unit in units:
            if unit.state in (State.PENDING, State.READING):
                self._end(unit, State.CANCELLED)

    def hasten(self, owner: int) -> None:
        """A running step waits for this owner: its batch comes before all others from now on."""
        owned = self._owners.get(owner)
        if not owned or owned[0].rank[0] in (0, next(iter(self._owners.values()))[0].rank[0]):
            return  # it comes first anyway
        batch = owned[0].rank[0]
        for units in tuple(self._owners.values()):
            if units[0].rank[0] == batch:
                for unit in units:
                    unit.rank = (0, unit.order, 0)
                    if unit.state is State.PENDING:
                        self._queue(unit)

    def pop_lost(self) -> list[ReadUnit[What]]:
        """Units lost since the last call by other ways than `finish` returning `LOST`: because a tier was paused."""
        lost, self._lost = self._lost, []
        return lost

    def takeable(self, tier: int) -> bool:
        """True while some pending unit is for this tier, whether or not it has a read to spare."""
        return self._head(tier) is not None

    def look_again(self, tier: int, now: float) -> float | None:
        """When a tier that got nothing may get something though nothing ends or is added; None: never."""
        if self._paused >> tier & 1:
            return self.health[tier].paused_until if self.takeable(tier) else None
        outstanding = self._outstanding[tier]
        if not self._hedging or outstanding >= self._depths[tier] or (outstanding and self.health[tier].on_probation):
            return None
        times = (
            max(other.started + other.expected for other in attempt.unit.attempts or (attempt,))
            + self.speeds[tier].expected(attempt.unit.nbytes)
            for attempt in self._attempts
            if self._can_hedge(attempt.unit, tier)
        )
        return min(times, default=None)

    # What other policies change.

    def _admit(self, units: Sequence[ReadUnit[What]]) -> None:
        """Queue new units."""
        up = self._everyone & ~self._paused
        rows: dict[tuple[int, int], tuple[Rank, deque[ReadUnit[What]]]] = {}
        for unit in units:
            holders, order = unit.holders, unit.order
            if not holders & up:
                self._queue(unit)
                continue
            row = rows.get((order, holders))
            if row is None:
                row = rows[order, holders] = self._new_row(self._batch, order, holders)
            unit.rank, unit.allowed = row[0], holders
            row[1].append(unit)

    def _allowed(self, unit: ReadUnit[What], able: int) -> int:
        """Which of the tiers that are able to read a unit may take it."""
        return able

    # Pending units.

    def _queue(self, unit: ReadUnit[What]) -> None:
        able = unit.holders & ~unit.failed
        if not able & ~self._paused:
            self._end(unit, State.LOST)
            self._lost.append(unit)
            return
        unit.state = State.PENDING
        unit.allowed = self._allowed(unit, able)
        row = self._new_row(unit.rank[0], unit.order, unit.allowed)
        unit.rank = row[0]
        row[1].append(unit)

    def _new_row(self, batch: int, order: int, allowed: int) -> tuple[Rank, deque[ReadUnit[What]]]:
        self._rows += 1
        row: tuple[Rank, deque[ReadUnit[What]]] = ((batch, order, self._rows), deque())
        heapq.heappush(self._heaps.setdefault(allowed, []), row)
        return row

    def _head(self, tier: int) -> deque[ReadUnit[What]] | None:
        """The row whose first unit the tier takes next."""
        best, best_rank = None, (0, 0, 0)
        for allowed, heap in self._heaps.items():
            if not allowed >> tier & 1:
                continue
            while heap:
                rank, row = heap[0]
                while row and not self._waits(row[0], rank, allowed):
                    row.popleft()  # taken back, or moved to another row
                if row:
                    own = (rank[0], (allowed & ~self._paused).bit_count(), rank[1])
                    if best is None or own < best_rank:
                        best, best_rank = row, own
                    break
                heapq.heappop(heap)
        return best

    def _next(self, tier: int) -> ReadUnit[What] | None:
        row = self._head(tier)
        return None if row is None else row.popleft()

    def _waits(self, unit: ReadUnit[What], rank: Rank, allowed: int) -> bool:
        """Whether a unit in a row is pending there, not only a trace of it."""
        return unit.state is State.PENDING and unit.rank is rank and unit.allowed == allowed

    def _end(self, unit: ReadUnit[What], state: State) -> None:
        unit.state = state
        left = self._left[unit.owner] - 1
        if left:
            self._left[unit.owner] = left
        else:
            del self._left[unit.owner], self._owners[unit.owner]

    # Hedges.

    def _can_hedge(self, unit: ReadUnit[What], tier: int) -> bool:
        return (
            unit.state is State.READING
            and bool(unit.holders & ~unit.failed & (1 << tier))
            and all(attempt.tier != tier for attempt in unit.attempts or ())
        )

    def _stalled(self, tier: int, now: float) -> ReadUnit[What] | None:
        while self._watched:
            attempt = self._watched[0]
            if attempt.over or attempt.unit.state is not State.READING:
                self._watched.popleft()
                continue
            if now - attempt.started <= STALL_FACTOR * attempt.expected + STALL_SECONDS:
                return None
            unit = attempt.unit
            if not self._can_hedge(unit, tier) or attempt.remaining(now) <= self.speeds[tier].expected(unit.nbytes):
                return None
            self._watched.popleft()
            return unit
        return None

    def _slowest(self, tier: int, now: float) -> ReadUnit[What] | None:
        slowest, longest = None, 0.0
        for attempt in self._attempts:
            unit = attempt.unit
            if not self._can_hedge(unit, tier):
                continue
            remaining = min(other.remaining(now) for other in unit.attempts or (attempt,))
            if remaining > longest and remaining > self.speeds[tier].expected(unit.nbytes):
                slowest, longest = unit, remaining
        return slowest

    # Pauses.

    def _pause(self, tier: int) -> None:
        """Leave a tier alone; what only it could read goes elsewhere or is lost."""
        self._paused |= 1 << tier
        for allowed in [mask for mask in self._heaps if not mask & ~self._paused]:
            for rank, row in sorted(self._heaps.pop(allowed)):
                for unit in row:
                    if self._waits(unit, rank, allowed):
                        self._queue(unit)

    def _unpause(self, tier: int, now: float) -> None:
        if self._paused >> tier & 1 and not self.health[tier].paused(now):
            self._paused &= ~(1 << tier)
