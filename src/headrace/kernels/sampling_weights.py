"""From a row of logits to the weights that sampling works on.

A row of V logits becomes weights `w = exp((logit - max) / temperature)` in [0, 1], rounded to multiples of 2^-34. Sums
of such weights are exact in float64 (for V <= 2^19), so the order in which they are added, the number of threads and
the width of the vector unit change nothing: which tokens are kept and which one is drawn are defined exactly.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import intrinsic

BLOCK = 64
"""Tokens that share one maximum, by which whole blocks are skipped."""

MAX_VOCAB = 1 << 19
"""Sums of more weights would not be exact."""

LEAST = np.float32(2.0**-34)
"""The smallest weight above 0."""

_GRID = np.float32(2.0**-11)  # adding and subtracting it rounds a smaller float32 to a multiple of 2^-34
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it puts the nearest integer into the low mantissa bits
_LOG2E = 1.4426950408889634
_LOWEST = np.int32(-(1 << 31))
_MAGNITUDE = np.int32(0x7FFFFFFF)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@intrinsic
def float_bits(_typing: Any, _value: Any) -> Any:
    """The bits of a float32 as an int32; of non-negative numbers they have the same order."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), emit


@intrinsic
def bits_float(_typing: Any, _value: Any) -> Any:
    """The float32 with the bits of an int32."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), emit


@njit
def to_key(value):  # type: ignore[no-untyped-def]
    """An int32 that orders like the float32 `value`, negative ones too."""
    # Numba widens integer results to int64; the casts keep vectors at 32 bits a lane
    bits = float_bits(value)
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & _MAGNITUDE))


@njit
def from_key(key):  # type: ignore[no-untyped-def]
    """The float32 of a `to_key`."""
    return bits_float(np.int32(key ^ ((key >> np.int32(31)) & _MAGNITUDE)))


@njit
def _scan_span(row, length):  # type: ignore[no-untyped-def]
    nan = np.int32(0)
    high = _LOWEST
    for i in range(length):
        value = row[i]
        high = max(high, to_key(value))
        nan = np.int32(nan | np.int32(value != value))
    return high, nan


@njit
def scan(row, keys):  # type: ignore[no-untyped-def]
    """(largest logit, whether the row is unusable: NaN, +inf, or nothing above -inf) of a row [V].

    Fills `keys` [blocks] with the largest `to_key` of each block.
    """
    whole = row.shape[0] // BLOCK
    best, bad = _LOWEST, np.int32(0)
    for block in range(whole):
        high, nan = _scan_span(row[block * BLOCK :], BLOCK)
        keys[block] = high
        best = max(best, high)
        bad |= nan
    if whole < keys.shape[0]:
        high, nan = _scan_span(row[whole * BLOCK :], row.shape[0] - whole * BLOCK)
        keys[whole] = high
        best = max(best, high)
        bad |= nan
    top = from_key(best)
    return top, bad != 0 or np.isinf(top)


@njit
def first_of(row, keys, top):  # type: ignore[no-untyped-def]
    """The lowest id whose logit is `top`, the row's largest."""
    for block in range(keys.shape[0]):
        if from_key(keys[block]) == top:
            for i in range(block * BLOCK, min(row.shape[0], block * BLOCK + BLOCK)):
                if row[i] == top:
                    return i
    return -1


@njit(fastmath={"contract"})
def weigh(row, top, inverse_temperature, weights):  # type: ignore[no-untyped-def]
    """Fill `weights` [V] with exp((row - top) * inverse_temperature), rounded to multiples of 2^-34.

    2^t = 2^n * 2^f with n the nearest integer; 2^f by a minimax polynomial of degree 6 (relative error below 2e-7).
    """
    top = np.float32(top)  # a call from Python brings a float64, in which `_ROUND` would not round
    scale = np.float32(inverse_temperature * _LOG2E)
    for i in range(row.shape[0]):
        t = max((row[i] - top) * scale, np.float32(-40.0))
        shifted = t + _ROUND
        f = t - (shifted - _ROUND)
        p = np.float32(1.5353362e-4)
        p = p * f + np.float32(1.3398874e-3)
        p = p * f + np.float32(9.6184373e-3)
        p = p * f + np.float32(5.5503324e-2)
        p = p * f + np.float32(2.4022648e-1)
        p = p * f + np.float32(6.9314720e-1)
        p = p * f + np.float32(1.0)
        value = bits_float(np.int32(float_bits(p) + np.int32(float_bits(shifted) << np.int32(23))))
        weights[i] = value if value >= _GRID else (value + _GRID) - _GRID


@njit(fastmath={"reassoc"})
def _sum_span(weights, length):  # type: ignore[no-untyped-def]
    mass = 0.0
    high = np.int32(0)
    for i in range(length):
        mass += np.float64(weights[i])
        high = max(high, float_bits(weights[i]))
    return mass, bits_float(high)


@njit
def sum_blocks(weights, peaks):  # type: ignore[no-untyped-def]
    """The sum of the weights [V]; fills `peaks` [blocks] with the largest weight of each block."""
    whole = weights.shape[0] // BLOCK
    total = 0.0
    for block in range(whole):
        mass, peaks[block] = _sum_span(weights[block * BLOCK :], BLOCK)
        total += mass
    if whole < peaks.shape[0]:
        mass, peaks[whole] = _sum_span(weights[whole * BLOCK :], weights.shape[0] - whole * BLOCK)
        total += mass
    return total
