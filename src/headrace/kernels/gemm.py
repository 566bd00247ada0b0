"""Products of float32 rows by a weight that is packed once: y = x W^T (+ a bias, + a residual), and the gated MLP's.

Why not the library's: with few rows (decode) its time is that of reading the weight *plus* that of computing, because
the next weights are only asked for when they are needed. These kernels prefetch the panel after the one that is being
multiplied, spread over the latter's tiles, so that reading hides behind computing (docs/decisions/0010).

A weight `[n, k]` is cut into panels of some columns of the product, each `[k, columns]`, one behind the other; a
narrower one may come last. Threads of torch's team take panels as they come free. Each number is summed over k in
one order, whatever the rows, panels and threads, so that a row does not depend on its batch neighbours.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding  # type: ignore[import-untyped]
from numba import carray, types
from torch import Tensor

from headrace.kernels import openmp
from headrace.kernels.activations import gelu_tanh, silu
from headrace.kernels.compiled import c_function
from headrace.kernels.gemm_tiles import product_tile, tile_rows
from headrace.kernels.huge_pages import WeightArena
from headrace.kernels.memory import address_of, fetch_add, floats

_SOURCES = ("gemm.py", "gemm_tiles.py", "tiles.py", "activations.py", "memory.py", "vectors.py")
_FAST = {"reassoc", "contract", "nsz", "arcp"}

_PANEL_BYTES = 320 << 10
"""Of a panel, what is multiplied at once: it stays in the second-level cache for all rows."""
_GATED_ROWS = 144
"""Rows at a time in a gated product, whose two halves wait in a scratch that should stay in the cache."""
_PANELS = 2
"""Panels that a thread takes at a time."""
_SERIAL_MULTIPLIES = 1 << 19
"""Products smaller than this are not worth waking other threads."""

_NUMBERS = (
    "items", "entered", "x", "x_step", "w", "y", "y_step", "plus", "plus_step", "scratch",
    "rows", "row_block", "tile", "n", "k", "k_block", "act",
)  # fmt: skip


@functools.cache
def _shape() -> tuple[int, int]:
    """Lanes of a vector register, and vectors per panel."""
    return (16, 3) if binding.get_host_cpu_features().get("avx512f") else (8, 2)


def supported(weight: Tensor) -> bool:
    """Whether a weight `[n, k]` can be packed here: float32, whole vectors of columns, a CPU with FMA instructions."""
    return (
        weight.dtype == torch.float32
        and weight.shape[0] % _shape()[0] == 0
        and bool(binding.get_host_cpu_features().get("fma"))
    )


@functools.cache
def _argument() -> type[ctypes.Structure]:
    """What a kernel is given: `_NUMBERS`, and an array whose type says the shape of a panel."""
    lanes, vectors = _shape()
    fields = [*((name, ctypes.c_int64) for name in _NUMBERS), ("kind", (ctypes.c_float * vectors) * lanes)]
    return type("Argument", (ctypes.Structure,), {"_fields_": fields})


@numba.njit(inline="always")
def _panel(a, x, panel, vectors, rows, y, y_step, plus, plus_step):  # type: ignore[no-untyped-def]
    """Multiplies some rows by one panel, a block of k at a time, tile by tile."""
    lanes = a.kind.shape[0]
    line = 64
    tiles = (rows + a.tile - 1) // a.tile
    for k0 in range(0, a.k, a.k_block):
        depth = min(a.k_block, a.k - k0)
        w = panel + k0 * vectors * lanes * 4
        ahead = w + depth * vectors * lanes * 4
        done = 0
        for i in range(tiles):
            m = (rows - done + tiles - i - 1) // (tiles - i)
            fetch = ahead + i * depth * line if i < vectors and not (tiles < vectors and i) else w
            product_tile(
                a.kind, m, vectors, tiles < vectors and i == 0,
                x + done * a.x_step + k0 * 4, a.x_step, w, depth, y + done * y_step, y_step,
                plus + done * plus_step, plus_step, fetch,
            )  # fmt: skip
            done += m
        plus, plus_step = y, y_step  # further blocks of k are added to what is there


def _linear_kernel(argument):  # type: ignore[no-untyped-def]
    """Entry of a thread: panels of y = plus + x W^T."""
    a = carray(argument, 1)[0]
    lanes, full = a.kind.shape
    width = lanes * full
    panels = (a.n + width - 1) // width
    row_blocks = (a.rows + a.row_block - 1) // a.row_block
    while True:
        item = fetch_add(address_of(argument), 1)
        first = item // row_blocks * _PANELS
        if first >= panels:
            break
        start = item % row_blocks * a.row_block
        rows = min(a.row_block, a.rows - start)
        for p in range(first, min(first + _PANELS, panels)):
            column = p * width
            vectors = min(full, (a.n - column) // lanes)
            _panel(
                a, a.x + start * a.x_step, a.w + column * a.k * 4, vectors, rows,
                a.y + start * a.y_step + column * 4, a.y_step, a.plus + start * a.plus_step + column * 4, a.plus_step,
            )  # fmt: skip


def _gated_kernel(argument):  # type: ignore[no-untyped-def]
    """Entry of a thread: panels of y = act(x G^T) * (x U^T); in w a panel of U follows each of G."""
    a = carray(argument, 1)[0]
    lanes, full = a.kind.shape
    width = lanes * full
    panels = (a.n + width - 1) // width
    row_blocks = (a.rows + a.row_block - 1) // a.row_block
    scratch = a.scratch + fetch_add(address_of(argument) + 8, 1) * a.row_block * 2 * width * 4
    while True:
        item = fetch_add(address_of(argument), 1)
        p = item // row_blocks
        if p >= panels:
            break
        start = item % row_blocks * a.row_block
        rows = min(a.row_block, a.rows - start)
        column = p * width
        vectors = min(full, (a.n - column) // lanes)
        own = vectors * lanes
        x = a.x + start * a.x_step
        w = a.w + 2 * column * a.k * 4
        _panel(a, x, w, vectors, rows, scratch, 2 * own * 4, a.plus, 0)
        _panel(a, x, w + own * a.k * 4, vectors, rows, scratch + own * 4, 2 * own * 4, a.plus, 0)
        both = carray(floats(scratch), (rows, 2 * own))
        for t in range(rows):
            out = carray(floats(a.y + (start + t) * a.y_step + column * 4), own)
            if a.act == 0:
                for j in range(own):
                    out[j] = silu(both[t, j]) * both[t, own + j]
            else:
                for j in range(own):
                    out[j] = gelu_tanh(both[t, j]) * both[t, own + j]


@functools.cache
def _kernel(function: Any) -> Any:
    argument = types.CPointer(numba.from_dtype(np.dtype(_argument())))
    return c_function(types.void(argument), function, _SOURCES, fastmath=_FAST)


@functools.cache
def _address(function: Any) -> int:
    return int(_kernel(function).address)


@dataclass(frozen=True)
class PackedWeight:
    """A weight in panels.

    Attributes:
        panels: its numbers, flat.
        n: rows of the weight, columns of the product.
        k: columns of the weight.
        gated: it is two weights of n rows each, panel by panel in turn.
    """

    panels: Tensor
    n: int
    k: int
    gated: bool = False


def pack(weight: Tensor) -> PackedWeight:
    """Packs `[n, k]`, which must be `supported`."""
    n, k = weight.shape
    return PackedWeight(_together(_panels(weight)), n, k)


def pack_gated(gate_up: Tensor) -> PackedWeight:
    """Packs gate above up, `[2n, k]`, for `gated`; each half must be `supported`."""
    n, k = gate_up.shape[0] // 2, gate_up.shape[1]
    gate, up = _panels(gate_up[:n]), _panels(gate_up[n:])
    return PackedWeight(_together([torch.stack((g, u), -3) for g, u in zip(gate, up, strict=True)]), n, k, gated=True)


_arena = WeightArena()


def _together(parts: list[Tensor]) -> Tensor:
    """The numbers of all parts, one behind the other."""
    panels = _arena.floats(sum(part.numel() for part in parts))
    for part, target in zip(parts, panels.split([part.numel() for part in parts]), strict=True):
        target.view(part.shape).copy_(part)
    return panels


def _panels(weight: Tensor) -> list[Tensor]:
    """Full panels `[p, k, width]`, and the narrower one `[1, k, rest]` if there is one."""
    n, k = weight.shape
    lanes, vectors = _shape()
    width = lanes * vectors
    full = n // width * width
    parts = [weight[:full].reshape(-1, width, k).transpose(1, 2)]
    if full < n:
        parts.append(weight[full:].reshape(1, n - full, k).transpose(1, 2))
    return parts


def linear(x: Tensor, weight: PackedWeight, plus: Tensor | None, threads: int) -> Tensor:
    """x W^T + plus.

    Args:
        x: `[b, t, k]` float32 on CPU.
        weight: from `pack`.
        plus: `[n]` (a bias) or `[b, t, n]`, contiguous float32; None: nothing.
        threads: at most so many.

    Raises:
        TypeError: another type. ValueError: shapes that do not fit.
    """
    step = 0 if plus is None or plus.dim() == 1 else 4 * weight.n
    if plus is not None:
        wanted = (weight.n,) if plus.dim() == 1 else (*x.shape[:-1], weight.n)
        if plus.shape != wanted or plus.dtype is not torch.float32 or not plus.is_contiguous():
            raise ValueError(f"cannot add {plus.dtype} {tuple(plus.shape)} to a product {wanted}")
    return _run(_linear_kernel, x, weight, plus, step, threads)


def gated(x: Tensor, weight: PackedWeight, act: str, threads: int) -> Tensor:
    """act(x G^T) * (x U^T), `act` being `silu` or `gelu_tanh`; x `[b, t, k]` -> `[b, t, n]`; errors as `linear`."""
    return _run(_gated_kernel, x, weight, None, 0, threads, ("silu", "gelu_tanh").index(act))


def _run(
    kernel: Any, x: Tensor, weight: PackedWeight, plus: Tensor | None, plus_step: int, threads: int, act: int = 0
) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"packed products take float32, got {x.dtype}")
    k, n = weight.k, weight.n
    if x.shape[-1] != k or weight.gated != (kernel is _gated_kernel):
        raise ValueError(f"rows of {x.shape[-1]} do not fit a {'gated ' if weight.gated else ''}weight of {k}")
    if not x.is_contiguous():
        x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], n))
    rows = x.numel() // k
    if not rows:
        return y
    lanes, vectors = _shape()
    width = lanes * vectors
    if rows * n * k < _SERIAL_MULTIPLIES:
        threads = 1
    panels = -(-n // width)
    row_block, scratch = rows, None
    if weight.gated:
        row_block = -(-rows // -(-rows // _GATED_ROWS))
        scratch = x.new_empty(threads * row_block * 2 * width)
    elif panels // _PANELS < 4 * threads and rows > 4 * tile_rows(lanes):  # too few panels to share out: rows too
        row_block = -(-rows // min(threads, rows // (2 * tile_rows(lanes))))
    blocks = -(-4 * width * k // _PANEL_BYTES)
    argument = _argument()(
        0, 0, x.data_ptr(), 4 * k, weight.panels.data_ptr(), y.data_ptr(), 4 * n,
        (plus if plus is not None else _zeros(n)).data_ptr(), plus_step,
        scratch.data_ptr() if scratch is not None else 0,
        rows, row_block, tile_rows(lanes), n, k, -(-k // blocks), act,
    )  # fmt: skip
    openmp.run(_address(kernel), ctypes.addressof(argument), threads)
    return y


@functools.cache
def _zeros(n: int) -> Tensor:
    """A bias that adds nothing."""
    return torch.zeros(n)
