"""Other ways to share reads between tiers, behind the same interface, to compare the completion-driven pool with."""

from collections.abc import Sequence

from headrace.core.errors import ConfigError
from headrace.store.read_pool import ReadPool
from headrace.store.read_unit import ReadUnit, State, What

POLICIES = ("completion", "static", "sequential")


class StaticPool(ReadPool[What]):
    """Units are split up-front, in proportion to weights; a tier reads its own share only. No hedges.

    Args:
        depths: reads in flight per tier.
        weights: shares of the tiers, e.g. their nominal speeds; equal when left out.
    """

    def __init__(self, depths: Sequence[int], weights: Sequence[float] | None = None) -> None:
        super().__init__(depths, hedge=False)
        self._weights = tuple(weights or [1.0] * len(depths))
        self._given = [0.0] * len(depths)

    def _admit(self, units: Sequence[ReadUnit[What]]) -> None:
        for unit in units:
            self._queue(unit)

    def _allowed(self, unit: ReadUnit[What], able: int) -> int:
        up = able & ~self._paused
        tiers = [tier for tier in range(len(self._given)) if up >> tier & 1]
        tier = min(tiers, key=lambda tier: (self._given[tier] + unit.nbytes) / self._weights[tier])
        self._given[tier] += unit.nbytes
        return 1 << tier


class SequentialPool(ReadPool[What]):
    """One load after the other, every unit from the first tier that has it; others serve errors only. No hedges.

    Args:
        depths: reads in flight per tier, the fastest tier first.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__(depths, hedge=False)
        self._current: int | None = None
        self._admitting = False

    def hasten(self, owner: int) -> None:
        """Nothing: loads are served in the order in which they came."""

    def _allowed(self, unit: ReadUnit[What], able: int) -> int:
        up = able & ~self._paused
        return up & -up

    def _admit(self, units: Sequence[ReadUnit[What]]) -> None:
        """Queue the units of the oldest load, if they are not yet; of the next when all of them are lost at once."""
        if self._admitting:
            return
        self._admitting = True
        while self._owners and (owner := next(iter(self._owners))) != self._current:
            self._current = owner
            for unit in tuple(self._owners[owner]):
                if unit.state is State.PENDING:
                    self._queue(unit)
        self._admitting = False

    def _end(self, unit: ReadUnit[What], state: State) -> None:
        super()._end(unit, state)
        if unit.owner == self._current and unit.owner not in self._left:
            self._current = None
            self._admit(())


def pool_for(
    policy: str, depths: Sequence[int], *, hedge: bool = True, weights: Sequence[float] | None = None
) -> ReadPool[What]:
    """The pool of a policy, one of `POLICIES`.

    Args:
        policy: its name.
        depths: reads in flight per tier.
        hedge: for `completion`: whether slow reads are issued again elsewhere.
        weights: for `static`: shares of the tiers.

    Raises:
        ConfigError: there is no such policy.
    """
    if policy == "completion":
        return ReadPool(depths, hedge)
    if policy == "static":
        return StaticPool(depths, weights)
    if policy == "sequential":
        return SequentialPool(depths)
    raise ConfigError(f"read policy '{policy}' is not one of {', '.join(POLICIES)}")
