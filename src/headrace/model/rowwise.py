"""Row-by-row float32 kernels for what lies between the linears: one pass over the data, no temporaries.

Torch's own row norms and activations make several passes and temporaries and take two to three times as long. Serial:
they cost some 2% of the linears around them, and start no second pool of threads.
Compiled once, kept under `HEADRACE_HOME/kernels`.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import config as numba_config

from headrace.core.paths import home

#: Sums may be reordered and products contracted into FMAs; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_GELU = np.float32(2.0 * 0.7978845608028654)
_CUBE = np.float32(0.044715)
_ONE = np.float32(1)


@functools.cache
def _cache_folder() -> str:
    digest = hashlib.sha256(numba.__version__.encode() + Path(__file__).read_bytes()).hexdigest()[:16]
    return str(home() / "kernels" / f"rowwise-{digest}")


def _compile(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile now, or load what an earlier run compiled."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        before = numba_config.CACHE_DIR
        numba_config.CACHE_DIR = _cache_folder()
        try:
            compiled: Callable[..., Any] = numba.njit(
                signature, fastmath=_FAST, nogil=True, error_model="numpy", cache=True
            )(function)
        finally:
            numba_config.CACHE_DIR = before
        return compiled

    return wrap


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


@_compile("void(float32[:,:,::1], float32[::1], float32, float32[:,:,::1])")
def rms_norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean(x^2) + eps) * weight over the last axis; x, out [b, T, n], weight [n]."""
    width = x.shape[2]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            squares = np.float32(0)
            for j in range(width):
                squares += x[b, t, j] * x[b, t, j]
            factor = _ONE / np.sqrt(squares / np.float32(width) + eps)
            for j in range(width):
                out[b, t, j] = x[b, t, j] * factor * weight[j]


@_compile("void(float32[:,:,::1], int64, int64, int64, float32[::1], float32[::1], float32)")
def head_norms(qkv, heads, kv_heads, size, q_weight, k_weight, eps):  # type: ignore[no-untyped-def]
    """RMS norm of each query head by `q_weight` and each key head by `k_weight` [size], in place.

    qkv [b, T, (heads + 2 kv_heads) * size]: query heads, then key heads, then value heads.
    """
    for b in range(qkv.shape[0]):
        for t in range(qkv.shape[1]):
            for h in range(heads + kv_heads):
                start = h * size
                squares = np.float32(0)
                for j in range(size):
                    squares += qkv[b, t, start + j] * qkv[b, t, start + j]
                factor = _ONE / np.sqrt(squares / np.float32(size) + eps)
                if h < heads:
                    for j in range(size):
                        qkv[b, t, start + j] *= factor * q_weight[j]
                else:
                    for j in range(size):
                        qkv[b, t, start + j] *= factor * k_weight[j]


@_compile("void(float32[:,:,::1], int64, int64, float32[:,:,::1], float32[:,:,::1])")
def rotate(qkv, rotated, size, cos, sin):  # type: ignore[no-untyped-def]
    """Rotary embedding of the first `rotated` heads of `size` numbers, in place, in the split-half convention.

    qkv [b, T, n]; cos, sin [b, T, r]: the first r <= size numbers of each head turn, x * cos + rotate_half(x) * sin.
    """
    half = cos.shape[2] // 2
    for b in range(qkv.shape[0]):
        for t in range(qkv.shape[1]):
            for h in range(rotated):
                low = h * size
                high = low + half
                for j in range(half):
                    x = qkv[b, t, low + j]
                    y = qkv[b, t, high + j]
                    qkv[b, t, low + j] = x * cos[b, t, j] - y * sin[b, t, j]
                    qkv[b, t, high + j] = y * cos[b, t, half + j] + x * sin[b, t, half + j]


@_compile("void(float32[:,:,::1], float32[:,:,::1])")
def silu_gate(gate_up, out):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up; gate_up [b, T, 2n] holds gate, then up; out [b, T, n]."""
    width = out.shape[2]
    for b in range(out.shape[0]):
        for t in range(out.shape[1]):
            for j in range(width):
                gate = gate_up[b, t, j]
                out[b, t, j] = gate / (_ONE + _exp(-gate)) * gate_up[b, t, width + j]


@_compile("void(float32[:,:,::1], float32[:,:,::1])")
def gelu_tanh_gate(gate_up, out):  # type: ignore[no-untyped-def]
    """out = gelu(gate) * up, tanh form x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)); shapes as `silu_gate`."""
    width = out.shape[2]
    for b in range(out.shape[0]):
        for t in range(out.shape[1]):
            for j in range(width):
                gate = gate_up[b, t, j]
                inner = _GELU * (gate + _CUBE * gate * gate * gate)
                out[b, t, j] = gate / (_ONE + _exp(-inner)) * gate_up[b, t, width + j]
