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
MAX_VOCAB = 1 << 19  # sums of more weights would not be exact

_GRID = np.float32(2.0**-11)  # adding and subtracting it rounds a smaller float32 to a multiple of 2^-34
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it puts the nearest integer into the low mantissa bits
_LOG2E = 1.4426950408889634
_LOWEST = np.int32(-(1 << 31))
_SIGN = np.int32(0x7FFFFFFF)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@intrinsic
def float_bits(_typing: Any, _value: Any) -> Any:
    """The bits of a float32 as an int32."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@intrinsic
def bits_float(_typing: Any, _value: Any) -> Any:
    """The float32 with the bits of an int32."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@njit(nogil=True, cache=True, inline="always")
def order_key(value: float) -> int:
    """An int32 that orders like the float32 `value`; its own inverse on the bits."""
    bits = float_bits(value)
    return bits ^ ((bits >> np.int32(31)) & _SIGN)


@njit(nogil=True, cache=True)
def scan(row: Floats, block_keys: Ints) -> tuple[float, bool]:
    """The largest logit and whether the row is unusable (NaN, +inf, or nothing above -inf).

    Args:
        row: [V] logits.
        block_keys: [ceil(V / BLOCK)], filled with the largest `order_key` of each block.
    """
    nan = np.int32(0)
    best = _LOWEST
    for block in range(block_keys.shape[0]):
        high = _LOWEST
        for i in range(block * BLOCK, min(row.shape[0], block * BLOCK + BLOCK)):
            high = max(high, order_key(row[i]))
            nan |= np.int32(row[i] != row[i])
        block_keys[block] = high
        best = max(best, high)
    top = bits_float(best ^ ((best >> np.int32(31)) & _SIGN))
    return top, nan != 0 or np.isinf(top)


@njit(nogil=True, cache=True)
def first_of(row: Floats, block_keys: Ints, top: float) -> int:
    """The lowest id whose logit is `top`, the row's largest."""
    for block in range(block_keys.shape[0]):
        key = block_keys[block]
        if bits_float(key ^ ((key >> np.int32(31)) & _SIGN)) == top:
            for i in range(block * BLOCK, min(row.shape[0], block * BLOCK + BLOCK)):
                if row[i] == top:
                    return i
    return -1


@njit(nogil=True, cache=True, fastmath={"contract"})
def weigh(row: Floats, top: float, inverse_temperature: float, weights: Floats) -> None:
    """Fill `weights` with exp((row - top) * inverse_temperature), rounded to multiples of 2^-34.

    2^t = 2^n * 2^f with n the nearest integer; 2^f by its minimax polynomial of degree 6 (relative error below 2e-7).
    """
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
        value = bits_float(float_bits(p) + (float_bits(shifted) << np.int32(23)))
        weights[i] = value if value >= _GRID else (value + _GRID) - _GRID


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def sum_span(weights: Floats, start: int, stop: int) -> tuple[float, int]:
    """Sum and largest bits of `weights[start:stop]`. Reordering is harmless: sums are exact."""
    mass = 0.0
    high = np.int32(0)
    for i in range(start, stop):
        mass += np.float64(weights[i])
        high = max(high, float_bits(weights[i]))
    return mass, high


@njit(nogil=True, cache=True)
def sum_blocks(weights: Floats, block_bits: Ints) -> float:
    """The sum of the weights; fills `block_bits` with the largest bits of each block."""
    total = 0.0
    for block in range(block_bits.shape[0]):
        start = block * BLOCK
        stop = min(weights.shape[0], start + BLOCK)
        mass, block_bits[block] = sum_span(weights, start, stop)
        total += mass
    return total
