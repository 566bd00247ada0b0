"""Row-by-row float32 kernels for what lies between the linears: one pass over the data, no temporaries.

Torch's own row norms and activations make several passes and temporaries and take two to three times as long. Threads
of torch's team take blocks of rows as they come free; each row is computed by the same code whoever takes it, so the
result does not depend on `threads`. Small calls stay on the caller's thread.

All tensors are contiguous float32 on CPU; what is not raises `TypeError`, and shapes that do not fit `ValueError`.
"""

import ctypes
import functools
from typing import Any

import numba
import numpy as np
from numba import carray, types
from torch import Tensor, float32

from headrace.kernels import openmp
from headrace.kernels.compiled import c_function
from headrace.kernels.memory import address_of, fetch_add, floats

_SOURCES = ("rowwise.py", "memory.py", "vectors.py")
#: Sums may be reordered and products contracted into FMAs; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}

_SERIAL_ELEMENTS = 1 << 14
"""Calls on fewer elements than this are not worth waking other threads."""
_BLOCK_ELEMENTS = 1 << 13
"""Elements that a thread takes at a time, in whole rows."""

_ONE = np.float32(1)


class _Argument(ctypes.Structure):
    """What a kernel is given: the next block to take, rows in all and per block, addresses x, y, z, and numbers."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("ticket", "rows", "block", "x", "y", "z", "n", "heads", "size", "more")),
        ("eps", ctypes.c_float),
    )


@functools.cache
def _entry(kernel: Any) -> Any:
    """`kernel` as a C function; the function object keeps its code alive."""
    argument = types.CPointer(numba.from_dtype(np.dtype(_Argument)))
    return c_function(types.void(argument), kernel, _SOURCES, fastmath=_FAST)


@functools.cache
def _address(kernel: Any) -> int:
    return int(_entry(kernel).address)


def _run(kernel: Any, threads: int, rows: int, width: int, *rest: Any) -> None:
    """Runs a kernel on `rows` rows of `width` elements each; `rest` are the fields of `_Argument` after `block`."""
    parallel = rows * width >= _SERIAL_ELEMENTS
    argument = _Argument(0, rows, max(1, _BLOCK_ELEMENTS // width) if parallel else rows, *rest)
    openmp.run(_address(kernel), ctypes.addressof(argument), threads if parallel else 1)


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        if x.dtype is not float32 or not x.is_contiguous():
            raise TypeError(f"row kernels take contiguous float32 tensors, got {x.dtype} with strides {x.stride()}")


def _rms_norm(argument):  # type: ignore[no-untyped-def]
    a = carray(argument, 1)[0]
    rows, block, width, eps = a.rows, a.block, a.n, a.eps
    x, weight, out = carray(floats(a.x), (rows, width)), carray(floats(a.y), width), carray(floats(a.z), (rows, width))
    while True:
        first = fetch_add(address_of(argument), 1) * block
        if first >= rows:
            break
        for t in range(first, min(first + block, rows)):
            squares = np.float32(0)
            for j in range(width):
                squares += x[t, j] * x[t, j]
            factor = _ONE / np.sqrt(squares / np.float32(width) + eps)
            for j in range(width):
                out[t, j] = x[t, j] * factor * weight[j]


def _head_norms(argument):  # type: ignore[no-untyped-def]
    a = carray(argument, 1)[0]
    rows, block, width, heads, size, turning, eps = a.rows, a.block, a.n, a.heads, a.size, a.more, a.eps
    qkv, q_weight, k_weight = carray(floats(a.x), (rows, width)), carray(floats(a.y), size), carray(floats(a.z), size)
    while True:
        first = fetch_add(address_of(argument), 1) * block
        if first >= rows:
            break
        for t in range(first, min(first + block, rows)):
            for h in range(turning):
                start = h * size
                squares = np.float32(0)
                for j in range(size):
                    squares += qkv[t, start + j] * qkv[t, start + j]
                factor = _ONE / np.sqrt(squares / np.float32(size) + eps)
                if h < heads:
                    for j in range(size):
                        qkv[t, start + j] *= factor * q_weight[j]
                else:
                    for j in range(size):
                        qkv[t, start + j] *= factor * k_weight[j]


def _rotate(argument):  # type: ignore[no-untyped-def]
    a = carray(argument, 1)[0]
    rows, block, width, heads, size, turned = a.rows, a.block, a.n, a.heads, a.size, a.more
    qkv = carray(floats(a.x), (rows, width))
    cos, sin = carray(floats(a.y), (rows, turned)), carray(floats(a.z), (rows, turned))
    half = turned // 2
    while True:
        first = fetch_add(address_of(argument), 1) * block
        if first >= rows:
            break
        for t in range(first, min(first + block, rows)):
            for h in range(heads):
                low = h * size
                high = low + half
                for j in range(half):
                    x = qkv[t, low + j]
                    y = qkv[t, high + j]
                    qkv[t, low + j] = x * cos[t, j] - y * sin[t, j]
                    qkv[t, high + j] = y * cos[t, half + j] + x * sin[t, half + j]


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, threads: int) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last axis; x, out [b, T, n], weight [n]."""
    _check(x, weight, out)
    batch, rows, width = x.shape
    if out.shape != x.shape or weight.shape != (width,):
        raise ValueError(f"cannot norm {tuple(x.shape)} by {tuple(weight.shape)} into {tuple(out.shape)}")
    rows *= batch
    _run(_rms_norm, threads, rows, width, x.data_ptr(), weight.data_ptr(), out.data_ptr(), width, 0, 0, 0, eps)


def head_norms(
    qkv: Tensor, heads: int, kv_heads: int, size: int, q_weight: Tensor, k_weight: Tensor, eps: float, threads: int
) -> None:
    """RMS norm of each query head by `q_weight` and each key head by `k_weight` [size], in place.

    qkv [b, T, (heads + 2 kv_heads) * size]: query heads, then key heads, then value heads.
    """
    _check(qkv, q_weight, k_weight)
    batch, rows, width = qkv.shape
    if width != (heads + 2 * kv_heads) * size or q_weight.shape != (size,) or k_weight.shape != (size,):
        raise ValueError(f"rows of {width} are not {heads} + 2 * {kv_heads} heads of {size} with weights of that size")
    turning = heads + kv_heads
    addresses = qkv.data_ptr(), q_weight.data_ptr(), k_weight.data_ptr()
    _run(_head_norms, threads, batch * rows, turning * size, *addresses, width, heads, size, turning, eps)


def rotate(qkv: Tensor, rotated: int, size: int, cos: Tensor, sin: Tensor, threads: int) -> None:
    """Rotary embedding of the first `rotated` heads of `size` numbers, in place, in the split-half convention.

    qkv [b, T, n]; cos, sin [b, T, r]: the first r <= size numbers of each head turn, x * cos + rotate_half(x) * sin.
    """
    _check(qkv, cos, sin)
    batch, rows, width = qkv.shape
    turned = cos.shape[-1]
    if cos.shape != (batch, rows, turned) or sin.shape != cos.shape or turned > size or rotated * size > width:
        raise ValueError(f"cannot turn {rotated} heads of {size} in {tuple(qkv.shape)} by {tuple(cos.shape)}")
    addresses = qkv.data_ptr(), cos.data_ptr(), sin.data_ptr()
    _run(_rotate, threads, batch * rows, rotated * turned, *addresses, width, rotated, size, turned)
