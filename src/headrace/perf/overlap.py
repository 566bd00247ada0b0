"""How long compute- and memory-bound work take together on a device that runs them side by side, or does not."""

from collections.abc import Sequence


def overlapped(compute: float, memory: float, points: Sequence[tuple[float, float]]) -> float:
    """Seconds for both kinds of work.

    At a point (r, p) linears run at 1 - r of their rate while KV is read at p of its bandwidth, until one kind is done;
    the rest of the other runs alone. Either ends first:

        compute + memory * r/p            memory does
        memory + compute * (1-p)/(1-r)    compute does

    the larger of the two being what happens. Without points times add up. Of several points the best is taken.

    Args:
        compute: seconds of the compute-bound work alone.
        memory: seconds of the memory-bound work alone.
        points: as in `DeviceProfile.overlap`; (0, 1) is perfect overlap, the larger of the two times.
    """
    best = compute + memory
    for share, rate in points:
        best = min(best, max(compute + memory * share / rate, memory + compute * (1 - rate) / (1 - share)))
    return best


def even_mix(points: Sequence[tuple[float, float]]) -> float:
    """The ratio of compute to memory seconds at which both end together, so that nothing runs alone; 0 without points.

    By the rule above no order of the same work is faster than one whose steps all stay on one side of this ratio.
    """
    if not points:
        return 0.0
    share, rate = min(points, key=lambda point: (1 - point[1]) / (1 - point[0]) + point[0] / point[1])
    return (1 - share) / rate
