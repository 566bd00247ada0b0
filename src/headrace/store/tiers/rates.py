"""Bandwidth over time, exactly integrated."""

import math
from collections.abc import Callable
from typing import Protocol


class Rate(Protocol):
    """A bandwidth that may change. Times are seconds since the tier was made, rates bytes per second."""

    def __call__(self, at: float) -> float:
        """The rate at a time."""
        ...

    def bytes_between(self, start: float, end: float) -> float:
        """What can be moved from `start` to `end`: the integral of the rate."""
        ...

    def finish(self, start: float, nbytes: float) -> float:
        """When `nbytes` are moved that were begun at `start`: the inverse of `bytes_between`."""
        ...


class Steps:
    """A rate that is constant in between changes and begins anew after each period.

    Args:
        changes: `(time, rate)`, times ascending from 0 and below the period.
        period: seconds; infinite: the last rate stays.

    Raises:
        ValueError: times do not ascend from 0, a rate is negative, or nothing would ever be moved.
    """

    def __init__(self, changes: tuple[tuple[float, float], ...], period: float = math.inf) -> None:
        times = [time for time, _ in changes]
        if not changes or times[0] != 0 or sorted(set(times)) != times or times[-1] >= period:
            raise ValueError(f"changes at {times} do not ascend from 0 to below the period of {period:g} s")
        if (
            any(rate < 0 for _, rate in changes)
            or (changes[-1][1] if period == math.inf else max(changes, key=lambda c: c[1])[1]) <= 0
        ):
            raise ValueError(f"rates {[rate for _, rate in changes]} must not be negative, nor all of them 0")
        ends = [*times[1:], period]
        self._pieces = [(begin, end, rate) for (begin, rate), end in zip(changes, ends, strict=True)]
        self._period = period
        self._per_period = math.inf if period == math.inf else sum((e - b) * rate for b, e, rate in self._pieces)

    def __call__(self, at: float) -> float:
        """See `Rate`."""
        at = at if self._period == math.inf else at % self._period
        return next(rate for begin, end, rate in self._pieces if begin <= at < end)

    def bytes_between(self, start: float, end: float) -> float:
        """See `Rate`."""
        return self._until(end) - self._until(start)

    def finish(self, start: float, nbytes: float) -> float:
        """See `Rate`."""
        whole = 0.0
        left = nbytes
        if self._period != math.inf:
            periods = start // self._period
            whole = periods * self._period
            left += self._until(start - whole)
            skipped = left // self._per_period
            whole += skipped * self._period
            left -= skipped * self._per_period
            if left == 0 and skipped and nbytes:
                # It ends with a period, or earlier when the period's last rates are 0.
                whole -= self._period
                left = self._per_period
        else:
            left += self._until(start)
        for begin, end, rate in self._pieces:
            room = rate * (end - begin) if rate else 0.0
            if left <= room:
                return max(start, whole + begin + (left / rate if rate else 0.0))
            left -= room
        return whole + self._period  # rounding left a fraction of a byte

    def _until(self, at: float) -> float:
        done = 0.0
        if self._period != math.inf:
            periods = at // self._period
            done = periods * self._per_period
            at -= periods * self._period
        return done + sum(rate * (min(end, at) - begin) for begin, end, rate in self._pieces if begin < at)


class Sampled:
    """A rate given as a function, taken as constant over each millisecond."""

    _STEP = 1e-3

    def __init__(self, function: Callable[[float], float]) -> None:
        self._function = function

    def __call__(self, at: float) -> float:
        """See `Rate`."""
        return self._function(at)

    def bytes_between(self, start: float, end: float) -> float:
        """See `Rate`."""
        total = 0.0
        while start < end:
            edge = min(self._edge(start), end)
            total += self._mid(start) * (edge - start)
            start = edge
        return total

    def finish(self, start: float, nbytes: float) -> float:
        """See `Rate`."""
        while True:
            edge, rate = self._edge(start), self._mid(start)
            if rate * (edge - start) >= nbytes:
                return start + (nbytes / rate if rate else 0.0)
            nbytes -= rate * (edge - start)
            start = edge

    def _edge(self, at: float) -> float:
        edge = (math.floor(at / self._STEP) + 1) * self._STEP
        return edge if edge > at else edge + self._STEP

    def _mid(self, at: float) -> float:
        return self._function((math.floor(at / self._STEP) + 0.5) * self._STEP)


def steps(*changes: tuple[float, float], period: float = math.inf) -> Steps:
    """`steps((0, 250e6), (2, 80e6), period=3)`: 250 MB/s, and 80 MB/s for the last second of every three."""
    return Steps(changes, period)


def as_rate(bandwidth: "float | Callable[[float], float] | Rate") -> Rate:
    """A rate of a number, a function of time, or a rate."""
    if isinstance(bandwidth, Steps | Sampled):
        return bandwidth
    if callable(bandwidth):
        return Sampled(bandwidth)
    return Steps(((0.0, float(bandwidth)),))
