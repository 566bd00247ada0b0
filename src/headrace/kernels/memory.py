"""Scalar access to memory by address, for compiled kernels that get addresses instead of arrays."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from headrace.kernels.vectors import BFLOAT16, F32, FLOAT16, FLOAT32, I16, I32, I64, Vectors


def _at(builder: Any, address: Any, index: Any, size: int) -> Any:
    return builder.add(address, builder.mul(index, I64(size)))


@intrinsic
def load_i64(typingctx: Any, address: Any, index: Any) -> Any:
    """The int64 number `index` at an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(_at(builder, args[0], args[1], 8), I64.as_pointer()), typ=I64)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def store_i64(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Sets the int64 number `index` at an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, index, value = args
        builder.store(value, builder.inttoptr(_at(builder, address, index, 8), I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def load_i32(typingctx: Any, address: Any, index: Any) -> Any:
    """The int32 number `index` at an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw = builder.load(builder.inttoptr(_at(builder, args[0], args[1], 4), I32.as_pointer()), typ=I32)
        return builder.sext(raw, I64)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def load_f32(typingctx: Any, address: Any, index: Any) -> Any:
    """The float32 number `index` at an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(_at(builder, args[0], args[1], 4), F32.as_pointer()), typ=F32)

    return types.float32(types.int64, types.int64), emit


@intrinsic
def store_f32(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Sets the float32 number `index` at an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, index, value = args
        builder.store(value, builder.inttoptr(_at(builder, address, index, 4), F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic
def store_kv(typingctx: Any, kv: Any, address: Any, index: Any, value: Any) -> Any:
    """Sets the stored element number `index` at an address to the nearest value of the element type of `kv`."""
    element = kv.dtype

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _kv, address, index, value = args
        address = _at(builder, address, index, 4 if element == FLOAT32 else 2)
        if element == FLOAT32:
            kind = F32
        elif element == FLOAT16:
            kind = ir.HalfType()
            value = builder.fptrunc(value, kind)
        else:
            assert element == BFLOAT16
            kind = I16
            value = _bfloat16(builder, value)
        builder.store(value, builder.inttoptr(address, kind.as_pointer()))
        return context.get_dummy_value()

    return types.void(kv, types.int64, types.int64, types.float32), emit


def _bfloat16(builder: Any, value: Any) -> Any:
    """Bits of the nearest bfloat16 (ties to even); NaN stays NaN."""
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.add(bits, builder.add(odd, I32(0x7FFF)))
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.lshr(builder.select(nan, I32(0x7FC00000), rounded), I32(16)), I16)


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at an address, atomically and in sequence with all threads; returns what was there before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, value = args
        return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), value, "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    """The address that a pointer holds, as an int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], I64)

    return types.int64(pointer), emit


@intrinsic
def floats(typingctx: Any, address: Any) -> Any:
    """An address as a pointer to float32 numbers, for `carray`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], F32.as_pointer())

    return types.CPointer(types.float32)(types.int64), emit


@intrinsic
def exp2(typingctx: Any, x: Any) -> Any:
    """2^x for x <= 0, with the rounding of the vector code."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Vectors(builder, 1).exp2(args[0])

    return types.float32(types.float32), emit
