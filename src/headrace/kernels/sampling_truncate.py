"""Which tokens min_p, top_k and top_p keep, and which of them is drawn, without sorting the vocabulary.

Tokens are ranked by (weight descending, id ascending). min_p, top_k and top_p each keep a prefix of that ranking, so
what they keep is described by the smallest kept weight and by how many tokens of that very weight are kept (`ties`,
the lowest ids first). The smallest weight is found by bisection on its bits: a pass counts and sums the weights above a
threshold at the speed of the vector unit, and the array shrinks with the interval. All sums are exact (see
`sampling_weights`).
"""

import numpy as np
from numba import njit

from headrace.kernels.sampling_weights import BLOCK, LEAST, bits_float, float_bits

_ABOVE_ONE = 0x3F800001  # bits of the float32 after 1, the largest weight


@njit(fastmath={"reassoc"})
def _tally(weights, n, floor):  # type: ignore[no-untyped-def]
    """How many of `weights[:n]` are at least `floor`, and their sum."""
    count = np.int32(0)
    mass = 0.0
    for i in range(n):
        heavy = weights[i] >= floor
        count = np.int32(count + np.int32(heavy))
        mass += np.float64(weights[i]) if heavy else 0.0
    return np.int64(count), mass


@njit
def _gather(weights, peaks, floor, found):  # type: ignore[no-untyped-def]
    """Copy the weights of at least `floor` to `found`; returns how many."""
    n = np.int64(0)
    for block in range(peaks.shape[0]):
        if peaks[block] >= floor:
            span = weights[block * BLOCK :]
            for i in range(min(BLOCK, span.shape[0])):
                found[n] = span[i]  # overwritten by the next one unless it counts: no branch to mispredict
                n += np.int64(span[i] >= floor)
    return n


@njit
def cut(weights, n, floor, count, target, between):  # type: ignore[no-untyped-def]
    """The shortest prefix of the ranking of `weights[:n]` that has `count` tokens or whose sum reaches `target`.

    Args:
        floor: at most the smallest of the weights; all together they have `count` tokens or reach `target`.
        between: scratch of the same length.

    Returns:
        (smallest weight, ties, mass) of the prefix.
    """
    low, high = np.int64(float_bits(floor)), np.int64(_ABOVE_ONE)
    reached = n  # tokens from `low` up
    above, mass = 0, 0.0  # tokens from `high` up, and their sum
    dropped, dropped_mass = 0, 0.0  # those of them that `current` no longer holds
    current = weights
    while high - low > 1:
        if n > BLOCK and (reached - above) * 4 <= n:
            kept = np.int64(0)
            for i in range(n):
                value = current[i]
                bits = np.int64(float_bits(value))
                between[kept] = value
                kept += np.int64((bits >= low) & (bits < high))
            current = between
            n = kept
            dropped, dropped_mass = above, mass
        middle = (low + high) >> 1
        more, heavier = _tally(current, n, bits_float(np.int32(middle)))
        more += dropped
        heavier += dropped_mass
        if more >= count or heavier >= target:
            low = middle
            reached = more
        else:
            high = middle
            above, mass = more, heavier
    smallest = bits_float(np.int32(low))
    value = np.float64(smallest)
    ties = min(reached, count) - above
    if mass + ties * value > target:
        enough = max(1, int((target - mass) / value))
        while mass + enough * value < target:
            enough += 1
        while enough > 1 and mass + (enough - 1) * value >= target:
            enough -= 1
        ties = min(ties, enough)
    return smallest, ties, mass + ties * value


@njit
def truncate(weights, total, peaks, top_k, top_p, min_p, found, between):  # type: ignore[no-untyped-def]
    """What min_p, then top_k, then top_p keep of a row, as (smallest weight, ties, mass).

    Only tokens that can be kept are looked at twice: the k-th largest block maximum is at most the k-th largest weight,
    and the tokens below (1 - top_p) * mass / V are together lighter than what top_p drops.

    Args:
        weights: [V]; total: their sum; peaks: the largest of each block.
        top_k: 0 or less keeps all; top_p: 1 keeps all; min_p: 0 keeps all.
        found, between: scratch, [V] each.
    """
    floor = max(np.float32(min_p), LEAST)
    if 0 < top_k <= peaks.shape[0]:
        floor = max(floor, cut(peaks, peaks.shape[0], np.float32(0), top_k, np.inf, between)[0])
    elif top_k <= 0 and min_p <= 0:
        floor = max(floor, np.float32((1.0 - top_p) * total / weights.shape[0] * 0.999))  # 0.999 outweighs rounding
    n = _gather(weights, peaks, floor, found)
    smallest, ties = floor, n
    mass = total if top_k <= 0 and min_p <= 0 else _tally(found, n, floor)[1]
    if 0 < top_k < n:
        smallest, ties, mass = cut(found, n, floor, top_k, np.inf, between)
    if top_p < 1.0:
        smallest, ties, mass = cut(found, n, floor, n, top_p * mass, between)
    return smallest, ties, mass


@njit(fastmath={"reassoc"})
def _kept_span(weights, length, smallest):  # type: ignore[no-untyped-def]
    """Sum of the weights above `smallest`, and how many equal it."""
    mass = 0.0
    equal = np.int32(0)
    for i in range(length):
        weight = weights[i]
        mass += np.float64(weight) if weight > smallest else 0.0
        equal = np.int32(equal + np.int32(weight == smallest))
    return mass, np.int64(equal)


@njit
def draw(weights, peaks, smallest, ties, point):  # type: ignore[no-untyped-def]
    """Inverse CDF: the first kept token, in the order of ids, at which the running sum of kept weights exceeds `point`.

    Args:
        smallest, ties: what is kept, as from `truncate`.
        point: in [0, mass). A uniform u <= 1 - 2^-53 gives u * mass < mass in float64, so a token is always found.
    """
    running = 0.0
    for block in range(peaks.shape[0]):
        if peaks[block] < smallest:
            continue
        start = block * BLOCK
        length = min(BLOCK, weights.shape[0] - start)
        if length == BLOCK:
            mass, equal = _kept_span(weights[start:], BLOCK, smallest)
        else:
            mass, equal = _kept_span(weights[start:], length, smallest)
        equal = min(equal, ties)
        mass += equal * np.float64(smallest)
        if running + mass <= point:
            running += mass
            ties -= equal
            continue
        for i in range(start, start + length):
            if weights[i] > smallest or (weights[i] == smallest and ties > 0):
                ties -= np.int64(weights[i] == smallest)
                running += np.float64(weights[i])
                if running > point:
                    return i
    return -1
