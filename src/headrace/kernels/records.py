"""Compiled kernels between stored records and pages: what the KV store's threads call.

A record is the canonical form of one layer's KV of a run of tokens: K then V, each `[heads, tokens, head_dim]`, in the
stored type. In a page K lies transposed and V padded (see `cpu`), so K goes through tiles of 8 x 8 elements transposed
in registers and V through plain copies. Elements move as raw bits. A kernel runs in the thread that calls it, beside
the team of the step loop, and holds no interpreter lock.
"""

import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types
from numba.extending import intrinsic

from headrace.kernels import openmp
from headrace.kernels.compiled import c_function
from headrace.kernels.memory import load_i64
from headrace.kernels.vectors import I32, I64

_SOURCES = ("vectors.py", "memory.py", "records.py")
_TILE = 8

#: Fields of a kernel's argument, all int64: addresses, then strides in bytes (`record_v`: from a record's K to its
#: V), then counts.
FIELDS = (
    "record", "k", "v", "pages",
    "record_layer", "record_v", "k_layer", "k_head", "k_page", "v_layer", "v_head", "v_page",
    "layers", "heads", "tokens", "first", "last", "dim", "page_size", "padded", "itemsize",
)  # fmt: skip
_ARGUMENT = np.dtype([(name, "i8") for name in FIELDS])


def _transpose_tile(bits: int) -> Any:
    """An intrinsic that copies a tile of 8 x 8 elements of so many bits, transposed."""

    @intrinsic
    def tile(typingctx: Any, source: Any, source_step: Any, target: Any, target_step: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, source_step, target, target_step = args
            kind = ir.VectorType(ir.IntType(bits), _TILE)
            rows = []
            for i in range(_TILE):
                address = builder.add(source, builder.mul(source_step, I64(i)))
                rows.append(builder.load(builder.inttoptr(address, kind.as_pointer()), align=bits // 8, typ=kind))
            for step in (1, 2, 4):  # swap off-diagonal blocks of step x step
                keep, swap = (
                    ir.Constant(ir.VectorType(I32, _TILE), mask)
                    for mask in (
                        [j if not j & step else _TILE + (j ^ step) for j in range(_TILE)],
                        [j ^ step if not j & step else _TILE + j for j in range(_TILE)],
                    )
                )
                for i in range(_TILE):
                    if not i & step:
                        upper, lower = rows[i], rows[i | step]
                        rows[i] = builder.shuffle_vector(upper, lower, keep)
                        rows[i | step] = builder.shuffle_vector(upper, lower, swap)
            for i in range(_TILE):
                address = builder.add(target, builder.mul(target_step, I64(i)))
                builder.store(rows[i], builder.inttoptr(address, kind.as_pointer()), align=bits // 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), emit

    return tile


def _move_one(bits: int) -> Any:
    """An intrinsic that copies one element of so many bits."""

    @intrinsic
    def move(typingctx: Any, source: Any, target: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.IntType(bits)
            value = builder.load(builder.inttoptr(args[0], kind.as_pointer()), typ=kind)
            builder.store(value, builder.inttoptr(args[1], kind.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return move


_tile_16, _tile_32 = _transpose_tile(16), _transpose_tile(32)
_move_16, _move_32 = _move_one(16), _move_one(32)


@intrinsic
def _copy(typingctx: Any, source: Any, target: Any, nbytes: Any) -> Any:
    """Copies bytes between places that do not overlap."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        source, target = (builder.inttoptr(arg, pointer) for arg in args[:2])
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, I64])
        builder.call(memcpy, [target, source, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@njit
def _transpose(source, source_step, target, target_step, rows, columns, itemsize):  # type: ignore[no-untyped-def]
    """Copies `rows` x `columns` elements, rows `source_step` bytes apart, to columns `target_step` bytes apart."""
    whole_rows, whole_columns = rows // 8 * 8, columns // 8 * 8
    for i in range(0, whole_rows, 8):
        for j in range(0, whole_columns, 8):
            a = source + i * source_step + j * itemsize
            b = target + j * target_step + i * itemsize
            if itemsize == 4:
                _tile_32(a, source_step, b, target_step)
            else:
                _tile_16(a, source_step, b, target_step)
    for i in range(rows):
        for j in range(whole_columns if i < whole_rows else 0, columns):
            a = source + i * source_step + j * itemsize
            b = target + j * target_step + i * itemsize
            if itemsize == 4:
                _move_32(a, b)
            else:
                _move_16(a, b)


@njit
def _move(a, load):  # type: ignore[no-untyped-def]
    """Tokens `first..last-1` of records of `tokens` into (or out of) the pages that hold them from token 0 on."""
    row, stored_row = a.dim * a.itemsize, a.padded * a.itemsize
    for plane in range(a.layers * a.heads):
        layer, head = plane // a.heads, plane % a.heads
        record_k = a.record + layer * a.record_layer + head * a.tokens * row
        record_v = record_k + a.record_v
        token = a.first
        while token < a.last:
            page, inside = load_i64(a.pages, token // a.page_size), token % a.page_size
            count = min(a.page_size - inside, a.last - token)
            k = a.k + layer * a.k_layer + head * a.k_head + page * a.k_page + inside * a.itemsize
            v = a.v + layer * a.v_layer + head * a.v_head + page * a.v_page + inside * stored_row
            if load:
                _transpose(record_k + token * row, row, k, a.page_size * a.itemsize, count, a.dim, a.itemsize)
            else:
                _transpose(k, a.page_size * a.itemsize, record_k + token * row, row, a.dim, count, a.itemsize)
            for i in range(count):
                inside_record = record_v + (token + i) * row
                if load:
                    _copy(inside_record, v + i * stored_row, row)
                else:
                    _copy(v + i * stored_row, inside_record, row)
            token += count


def load_kernel(argument):  # type: ignore[no-untyped-def]
    """Records of adjacent layers into pages; `argument` points to one int64 for each of `FIELDS`."""
    _move(carray(argument, 1)[0], True)


def save_kernel(argument):  # type: ignore[no-untyped-def]
    """Pages into records; the argument is that of `load_kernel`."""
    _move(carray(argument, 1)[0], False)


@functools.cache
def kernels() -> tuple[Any, Any]:
    """`load_kernel` and `save_kernel` as C functions, compiled or from the cache."""
    signature = types.void(types.CPointer(numba.from_dtype(_ARGUMENT)))
    return c_function(signature, load_kernel, _SOURCES), c_function(signature, save_kernel, _SOURCES)


def call(arguments: list[int]) -> tuple[int, int, object]:
    """Address of `load_kernel`, of its argument, and the argument; `arguments` are the values of `FIELDS`, in order."""
    argument = np.array(arguments, np.int64)
    return kernels()[0].address, argument.__array_interface__["data"][0], argument


def run(load: bool, arguments: list[int]) -> None:
    """Move records in this thread; `arguments` are the values of `FIELDS`, in order."""
    argument = np.array(arguments, np.int64)
    openmp.run(kernels()[0 if load else 1].address, argument.__array_interface__["data"][0], 1)
