"""Which tokens min_p, top_k and top_p keep, and which of them is drawn, without sorting the vocabulary.

Tokens are ranked by (weight descending, id ascending). min_p, top_k and top_p each keep a prefix of that ranking, so
what they keep is described by the bits of the smallest kept weight and by how many tokens of that very weight are kept
(`ties`, the lowest ids first). The bits are found by bisection: a pass counts and sums the weights above a threshold at
the speed of the vector unit, and the array shrinks as the interval does. All sums are exact (see `sampling_weights`).
"""

import numpy as np
from numba import njit

from headrace.kernels.sampling_weights import BLOCK, Floats, Ints, bits_float, float_bits

LEAST = np.float32(2.0**-34)  # the smallest weight above 0
_ABOVE_ONE = np.int32(0x3F800001)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def tally(weights: Floats, n: int, floor: float) -> tuple[int, float]:
    """How many of `weights[:n]` are at least `floor`, and their sum."""
    count = np.int32(0)
    mass = 0.0
    for i in range(n):
        heavy = weights[i] >= floor
        count += np.int32(heavy)
        mass += np.float64(weights[i]) if heavy else 0.0
    return np.int64(count), mass


@njit(nogil=True, cache=True)
def gather(weights: Floats, block_bits: Ints, least: int, found: Floats) -> int:
    """Copy the weights whose bits are at least `least` to `found`; returns how many."""
    size = weights.shape[0]
    n = 0
    for block in range(block_bits.shape[0]):
        if block_bits[block] >= least:
            for i in range(block * BLOCK, min(size, block * BLOCK + BLOCK)):
                found[n] = weights[i]
                n += np.int64(float_bits(weights[i]) >= least)
    return n


@njit(nogil=True, cache=True)
def cut(weights: Floats, n: int, least: int, count: int, target: float, between: Floats) -> tuple[int, int, float]:
    """The shortest prefix of the ranking of `weights[:n]` that has `count` tokens or whose sum reaches `target`.

    Args:
        weights: all of them have bits of at least `least`, and they have `count` tokens or reach `target` together.
        between: scratch of the same length.

    Returns:
        (bits, ties, mass) of the prefix.
    """
    low, high = np.int64(least), np.int64(_ABOVE_ONE)
    reached = n  # tokens from `low` up
    above, mass = 0, 0.0  # tokens from `high` up, and their sum
    dropped, dropped_mass = 0, 0.0  # those of them that `current` no longer holds
    current = weights
    while high - low > 1:
        if n > BLOCK and (reached - above) * 4 <= n:
            kept = 0
            for i in range(n):
                value = current[i]
                bits = np.int64(float_bits(value))
                between[kept] = value
                kept += np.int64((bits >= low) & (bits < high))
            current = between
            n = kept
            dropped, dropped_mass = above, mass
        middle = (low + high) >> 1
        more, heavier = tally(current, n, bits_float(np.int32(middle)))
        more += dropped
        heavier += dropped_mass
        if more >= count or heavier >= target:
            low = middle
            reached = more
        else:
            high = middle
            above, mass = more, heavier
    value = np.float64(bits_float(np.int32(low)))
    ties = min(reached, count) - above
    if mass + ties * value > target:
        enough = max(1, int((target - mass) / value))
        while mass + enough * value < target:
            enough += 1
        while enough > 1 and mass + (enough - 1) * value >= target:
            enough -= 1
        ties = min(ties, enough)
    return low, ties, mass + ties * value


@njit(nogil=True, cache=True)
def truncate(
    weights: Floats,
    total: float,
    block_bits: Ints,
    top_k: int,
    top_p: float,
    min_p: float,
    found: Floats,
    between: Floats,
) -> tuple[int, int, float]:
    """What min_p, then top_k, then top_p keep of the whole row, as (bits, ties, mass).

    Only tokens that can be kept are looked at twice: the k-th largest block maximum is at most the k-th largest weight,
    and the tokens below (1 - top_p) * mass / V are together lighter than what top_p drops.

    Args:
        weights: [V]; total: their sum; block_bits: the largest bits of each block.
        top_k: 0 or less keeps all; top_p: 1 keeps all; min_p: 0 keeps all.
        found, between: scratch, [V] each.
    """
    floor = max(np.float32(min_p), LEAST)
    if 0 < top_k <= block_bits.shape[0]:
        ranked = np.partition(block_bits, block_bits.shape[0] - top_k)
        floor = max(floor, bits_float(ranked[block_bits.shape[0] - top_k]))
    elif top_k <= 0 and min_p <= 0:
        floor = max(floor, np.float32((1.0 - top_p) * total / weights.shape[0] * 0.999))  # 0.999 outweighs rounding
    least = np.int64(float_bits(floor))
    n = gather(weights, block_bits, least, found)
    bits, ties = least, n
    mass = total if top_k <= 0 and min_p <= 0 else tally(found, n, floor)[1]
    if 0 < top_k < n:
        bits, ties, mass = cut(found, n, least, top_k, np.inf, between)
    if top_p < 1.0:
        bits, ties, mass = cut(found, n, least, n, top_p * mass, between)
    return bits, ties, mass


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def block_mass(weights: Floats, start: int, stop: int, floor: float) -> tuple[float, int]:
    """Sum of `weights[start:stop]` above `floor`, and how many equal it."""
    mass = 0.0
    equal = np.int32(0)
    for i in range(start, stop):
        mass += np.float64(weights[i]) if weights[i] > floor else 0.0
        equal += np.int32(weights[i] == floor)
    return mass, np.int64(equal)


@njit(nogil=True, cache=True)
def draw(weights: Floats, block_bits: Ints, bits: int, ties: int, point: float) -> int:
    """Inverse CDF: the first kept token, in the order of ids, at which the running sum of kept weights exceeds `point`.

    Args:
        bits, ties: what is kept, as from `truncate`.
        point: in [0, mass). A uniform u <= 1 - 2^-53 gives u * mass < mass in float64, so a token is always found.
    """
    size = weights.shape[0]
    floor = bits_float(np.int32(bits))
    running = 0.0
    for block in range(block_bits.shape[0]):
        if block_bits[block] < bits:
            continue
        start, stop = block * BLOCK, min(size, block * BLOCK + BLOCK)
        mass, equal = block_mass(weights, start, stop, floor)
        equal = min(equal, ties)
        mass += equal * np.float64(floor)
        if running + mass <= point:
            running += mass
            ties -= equal
            continue
        for i in range(start, stop):
            if weights[i] > floor or (weights[i] == floor and ties > 0):
                ties -= np.int64(weights[i] == floor)
                running += np.float64(weights[i])
                if running > point:
                    return i
    return -1
