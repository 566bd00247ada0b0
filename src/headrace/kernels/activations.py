"""Activations as scalar functions for compiled kernels; their loops vectorise."""

import numba
import numpy as np

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_GELU = np.float32(2.0 * 0.7978845608028654)
_CUBE = np.float32(0.044715)
_ONE = np.float32(1)


@numba.njit(inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x in float32 to about 1 ulp, x clamped to +-87: Cody-Waite reduction, the polynomial of Cephes `expf`."""
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@numba.njit(inline="always")
def silu(x):  # type: ignore[no-untyped-def]
    """x * sigmoid(x)."""
    return x / (_ONE + _exp(-x))


@numba.njit(inline="always")
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    """The tanh form of GELU, x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))."""
    return x / (_ONE + _exp(-_GELU * (x + _CUBE * x * x * x)))
