"""Emits LLVM vector code: loads that widen 16-bit KV, fused multiply-add, reductions, 2^x and tanh.

Numba offers no vector type, and its loops vectorise only along one axis; the attention tiles need registers blocked
over rows and tokens at once. So the inner tiles are emitted as LLVM IR. Nothing here uses fast-math: each result is
rounded the same way in whatever tile it is computed, so that a row does not depend on its neighbours.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)

FLOAT32, BFLOAT16, FLOAT16 = types.float32, types.uint16, types.int16
"""Numba types that stand for a stored element: 16-bit floats travel as integers, unsigned for bfloat16, else signed."""

EMPTY = -1e30
"""The maximum of no scores. Finite, so that the difference of two of them is 0 and not NaN."""

_LOG2_E = 1.4426950408889634
# Minimax fits with constant term 1 (relative error 2e-9 each): 2^x on [-1/2, 1/2] in x; tanh(x)/x on |x| <= 0.4 in x^2.
_EXP2 = (1.0, 0.6931472028090438, 0.24022647890467472, 0.05550332547311501, 0.009618439995103523, 0.0013398849140121003,
         0.00015352675003435352)  # fmt: skip
_TANH = (1.0, -0.3333329871148001, 0.13331214134897165, -0.053561934904073676, 0.01874405867944309)
# Adding 1.5 * 2^23 + 127 rounds to an integer and leaves it, biased as an exponent, in the low mantissa bits.
_ROUND = 12582912.0 + 127.0


class Vectors:
    """Vector instructions of one width on a builder.

    Args:
        builder: where to emit.
        lanes: float32 values per vector; 1 emits scalar code that rounds alike.
    """

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder = builder
        self.lanes = lanes
        self.type = ir.VectorType(F32, lanes) if lanes > 1 else F32
        self.ints = ir.VectorType(I32, lanes) if lanes > 1 else I32
        suffix = f"v{lanes}f32" if lanes > 1 else "f32"
        self._fma = builder.module.declare_intrinsic(
            f"llvm.fma.{suffix}", (), ir.FunctionType(self.type, [self.type] * 3)
        )

    def constant(self, value: float) -> Any:
        """`value` in all lanes."""
        return ir.Constant(self.type, [value] * self.lanes if self.lanes > 1 else value)

    def whole(self, value: int) -> Any:
        """An integer in all lanes."""
        return ir.Constant(self.ints, [value] * self.lanes if self.lanes > 1 else value)

    def iota(self) -> Any:
        """0, 1, 2, ... as integers."""
        return ir.Constant(self.ints, list(range(self.lanes)))

    def splat(self, scalar: Any) -> Any:
        """A scalar (float32 or int32) in all lanes."""
        if self.lanes == 1:
            return scalar
        kind = ir.VectorType(scalar.type, self.lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes))

    def load(self, address: Any, element: Any = FLOAT32) -> Any:
        """Consecutive stored elements at an integer address, as float32."""
        b = self.builder
        if element == FLOAT32:
            return b.load(b.inttoptr(address, self.type.as_pointer()), align=4, typ=self.type)
        stored = ir.VectorType(I16, self.lanes) if element == BFLOAT16 else ir.VectorType(ir.HalfType(), self.lanes)
        raw = b.load(b.inttoptr(address, stored.as_pointer()), align=2, typ=stored)
        if element == FLOAT16:
            return b.fpext(raw, self.type)
        return b.bitcast(b.shl(b.zext(raw, self.ints), self.whole(16)), self.type)

    def store(self, value: Any, address: Any) -> None:
        """Stores float32 values at an integer address."""
        b = self.builder
        b.store(value, b.inttoptr(address, self.type.as_pointer()), align=4)

    def broadcast(self, address: Any) -> Any:
        """One float32 at an integer address, in all lanes."""
        b = self.builder
        return self.splat(b.load(b.inttoptr(address, F32.as_pointer()), align=4, typ=F32))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        return self.builder.call(self._fma, [a, b, c])

    def larger(self, a: Any, b: Any) -> Any:
        """The maximum; b where one of them is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce(self, value: Any, combine: Any) -> Any:
        """Combines the lanes to a scalar, halving the width each time (a fixed order)."""
        width = self.lanes
        while width > 1:
            width //= 2
            low, high = (
                self.builder.shuffle_vector(
                    value, value, ir.Constant(ir.VectorType(I32, width), list(range(at, at + width)))
                )
                for at in (0, width)
            )
            value = combine(low, high)
        return self.builder.extract_element(value, I32(0)) if self.lanes > 1 else value

    def _polynomial(self, x: Any, coefficients: tuple[float, ...]) -> Any:
        result = self.constant(coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            result = self.fma(result, x, self.constant(coefficient))
        return result

    def exp2(self, x: Any) -> Any:
        """2^x for x <= 0, relative error below 2e-7; exactly 1 at 0, exactly 0 below -126.5; NaN stays NaN."""
        b = self.builder
        floor = self.constant(-127.0)
        x = b.select(b.fcmp_ordered("<", x, floor), floor, x)
        shifted = b.fadd(x, self.constant(_ROUND))
        fraction = b.fsub(x, b.fsub(shifted, self.constant(_ROUND)))
        power = b.bitcast(b.shl(b.bitcast(shifted, self.ints), self.whole(23)), self.type)
        return b.fmul(self._polynomial(fraction, _EXP2), power)

    def tanh(self, x: Any) -> Any:
        """tanh, relative error below 4e-7."""
        b = self.builder
        sign = b.and_(b.bitcast(x, self.ints), self.whole(-(1 << 31)))
        size = b.bitcast(b.xor(b.bitcast(x, self.ints), sign), self.type)
        decay = self.exp2(b.fmul(size, self.constant(-2.0 * _LOG2_E)))
        one = self.constant(1.0)
        far = b.fdiv(b.fsub(one, decay), b.fadd(one, decay))
        near = b.fmul(size, self._polynomial(b.fmul(size, size), _TANH))
        result = b.select(b.fcmp_ordered("<", size, self.constant(0.4)), near, far)
        return b.bitcast(b.or_(b.bitcast(result, self.ints), sign), self.type)
