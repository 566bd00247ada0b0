"""Emits xxh3_64 of many records as LLVM code on vectors of eight 64-bit lanes.

Formulas: `doc/xxhash_spec.md` of xxHash 0.8, "XXH3 algorithm for long inputs", seed 0 and the default secret.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_START = (_P32[2], *_P64[:4], _P32[1], _P64[4], _P32[0])
_AVALANCHE = 0x165667919E3779F9

_STRIPE = 64
_BLOCK = _STRIPE * ((len(_SECRET) - _STRIPE) // 8)

_I64 = ir.IntType(64)
_LANES = ir.VectorType(_I64, 8)


def emit(module: ir.Module) -> None:
    """Adds `int64 first_wrong(int64 records, int64 size, int64 count, uint64 *sums)`.

    It returns the number of the first record, of `size` bytes each from address `records`, whose sum is not in its
    place in `sums`, or `count`. Records have more than 240 bytes: for shorter ones there are other formulas.
    """
    pointer = _I64.as_pointer()
    kind = ir.FunctionType(_I64, [_I64, _I64, _I64, pointer])
    function = ir.Function(module, kind, "first_wrong")
    records, size, count, sums = function.args
    begin = function.append_basic_block("begin")
    record = function.append_basic_block("record")
    proven = function.append_basic_block("proven")
    end = function.append_basic_block("end")
    b = ir.IRBuilder(begin)
    b.branch(record)

    b.position_at_end(record)
    number = b.phi(_I64)
    number.add_incoming(_I64(0), begin)
    code = _Xxh3(b)
    total = code.hash(b.add(records, b.mul(number, size)), size)
    right = b.icmp_unsigned("==", total, b.load(b.gep(sums, [number])))
    b.cbranch(right, proven, end)
    last = b.block

    b.position_at_end(proven)
    following = b.add(number, _I64(1))
    number.add_incoming(following, proven)
    b.cbranch(b.icmp_unsigned("<", following, count), record, end)

    b.position_at_end(end)
    result = b.phi(_I64)
    result.add_incoming(number, last)
    result.add_incoming(following, proven)
    b.ret(result)


class _Xxh3:
    """Emits the sum of one input of more than 240 bytes."""

    def __init__(self, builder: Any) -> None:
        self._b = builder

    def hash(self, start: Any, size: Any) -> Any:
        """The sum of `size` bytes at an address."""
        b = self._b
        before_last = b.sub(size, _I64(1))
        blocks = b.udiv(before_last, _I64(_BLOCK))
        lanes = self._loop(blocks, ir.Constant(_LANES, list(_START)), lambda n, lanes: self._block(start, n, lanes))
        rest = b.add(start, b.mul(blocks, _I64(_BLOCK)))
        stripes = b.udiv(b.urem(before_last, _I64(_BLOCK)), _I64(_STRIPE))
        table = self._secret_table()

        def stripe(number: Any, lanes: Any) -> Any:
            key = b.load(b.bitcast(b.gep(table, [_I64(0), b.mul(number, _I64(8))]), _LANES.as_pointer()), align=1)
            return self._accumulate(lanes, b.add(rest, b.mul(number, _I64(_STRIPE))), key)

        lanes = self._loop(stripes, lanes, stripe)
        lanes = self._accumulate(lanes, b.sub(b.add(start, size), _I64(_STRIPE)), _key(len(_SECRET) - _STRIPE - 7))
        return self._merge(lanes, size)

    def _block(self, start: Any, number: Any, lanes: Any) -> Any:
        b = self._b
        at = b.add(start, b.mul(number, _I64(_BLOCK)))
        for stripe in range(_BLOCK // _STRIPE):
            lanes = self._accumulate(lanes, b.add(at, _I64(stripe * _STRIPE)), _key(8 * stripe))
        lanes = b.xor(lanes, b.lshr(lanes, _splat(47)))
        return b.mul(b.xor(lanes, _key(len(_SECRET) - _STRIPE)), _splat(_P32[0]))

    def _accumulate(self, lanes: Any, address: Any, key: Any) -> Any:
        b = self._b
        data = b.load(b.inttoptr(address, _LANES.as_pointer()), align=1)
        keyed = b.xor(data, key)
        product = b.mul(b.and_(keyed, _splat(0xFFFFFFFF)), b.lshr(keyed, _splat(32)))
        swap = ir.Constant(ir.VectorType(ir.IntType(32), 8), [lane ^ 1 for lane in range(8)])
        return b.add(b.add(lanes, b.shuffle_vector(data, data, swap)), product)

    def _merge(self, lanes: Any, size: Any) -> Any:
        b = self._b
        wide = ir.IntType(128)
        mixed = b.xor(lanes, _key(11))
        total = b.mul(size, _I64(_P64[0]))
        for pair in range(0, 8, 2):
            x, y = (b.zext(b.extract_element(mixed, ir.IntType(32)(lane)), wide) for lane in (pair, pair + 1))
            product = b.mul(x, y)
            folded = b.xor(b.trunc(product, _I64), b.trunc(b.lshr(product, wide(64)), _I64))
            total = b.add(total, folded)
        total = b.mul(b.xor(total, b.lshr(total, _I64(37))), _I64(_AVALANCHE))
        return b.xor(total, b.lshr(total, _I64(32)))

    def _loop(self, count: Any, value: Any, body: Callable[[Any, Any], Any]) -> Any:
        """`value = body(number, value)` for `number` from 0 to `count - 1`; returns the last value."""
        b = self._b
        before, head = b.block, b.append_basic_block("head")
        inside, after = b.append_basic_block("inside"), b.append_basic_block("after")
        b.branch(head)
        b.position_at_end(head)
        number, carried = b.phi(_I64), b.phi(_LANES)
        number.add_incoming(_I64(0), before)
        carried.add_incoming(value, before)
        b.cbranch(b.icmp_unsigned("<", number, count), inside, after)
        b.position_at_end(inside)
        result = body(number, carried)
        number.add_incoming(b.add(number, _I64(1)), b.block)
        carried.add_incoming(result, b.block)
        b.branch(head)
        b.position_at_end(after)
        return carried

    def _secret_table(self) -> Any:
        kind = ir.ArrayType(ir.IntType(8), len(_SECRET))
        table = ir.GlobalVariable(self._b.module, kind, "secret")
        table.global_constant = True
        table.linkage = "internal"
        table.initializer = ir.Constant(kind, bytearray(_SECRET))
        return table


def _key(offset: int) -> Any:
    """64 bytes of the secret as lanes."""
    words = np.frombuffer(_SECRET, "<u8", 8, offset)
    return ir.Constant(_LANES, [int(word) for word in words])


def _splat(value: int) -> Any:
    return ir.Constant(_LANES, [value] * 8)
