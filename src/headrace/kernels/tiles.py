"""The three inner tiles of attention, as Numba intrinsics: scores, softmax, weighted sum.

A *strip* is a run of `lanes` tokens inside one page; strips are given as arrays of addresses, so a tile walks a page
table without copying. `kv` in the signatures is an array whose type alone matters: `dtype` says how KV is stored and
`shape` is (lanes, strips per tile). All addresses are integers; all sums run in one order, whatever the tile.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.kernels.vectors import EMPTY, FLOAT32, I32, I64, Vectors

_INT = types.int64


def grid(builder: Any, v: Vectors, rows: int, columns: int) -> list[list[Any]]:
    """Accumulators set to zero (allocas that LLVM keeps in registers)."""
    cells = [[cgutils.alloca_once(builder, v.type) for _ in range(columns)] for _ in range(rows)]
    for row in cells:
        for cell in row:
            builder.store(v.constant(0.0), cell)
    return cells


def accumulate(builder: Any, v: Vectors, cells: list[list[Any]], factors: list[Any], columns: list[Any]) -> None:
    """`cells[m][j] += factors[m] * columns[j]`."""
    for row, factor in zip(cells, factors):
        for cell, column in zip(row, columns):
            builder.store(v.fma(factor, column, builder.load(cell, typ=v.type)), cell)


def prefetch(builder: Any, address: Any) -> None:
    """Fetches a line into the second-level cache: the first has too few fills in flight to cover memory's latency."""
    pointer = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    )
    builder.call(function, [builder.inttoptr(address, pointer), I32(0), I32(2), I32(1)])


@intrinsic(prefer_literal=True)
def score_tile(
    typingctx: Any, kv: Any, rows: Any, q: Any, q_step: Any, dim: Any, strips: Any, k_step: Any, out: Any, out_step: Any
) -> Any:
    """`out[m, j * lanes + l] = sum over d of q[m, d] * strips[j][d, l]` for a literal number of rows m.

    Args:
        typingctx: Numba's.
        kv: see the module.
        rows: literal number of rows.
        q: address of float32 rows, `q_step` bytes apart.
        q_step: see q.
        dim: number of d.
        strips: address of the addresses of the strips of K at d = 0; those of the following tile are prefetched.
        k_step: bytes from d to d + 1 in a page.
        out: address of float32 rows, `out_step` bytes apart.
        out_step: see out.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    lanes, count = kv.shape
    m = rows.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _kv, _rows, q, q_step, dim, strips, k_step, out, out_step = args
        v = Vectors(builder, lanes)
        address = [_load_i64(builder, strips, j) for j in range(2 * count)]
        rows_at = [builder.add(q, builder.mul(q_step, I64(i))) for i in range(m)]
        cells = grid(builder, v, m, count)
        with cgutils.for_range(builder, dim) as loop:
            offset = builder.mul(loop.index, k_step)
            columns = [v.load(builder.add(address[j], offset), kv.dtype) for j in range(count)]
            for j in range(count):
                prefetch(builder, builder.add(address[count + j], offset))
            at = builder.mul(loop.index, I64(4))
            accumulate(builder, v, cells, [v.broadcast(builder.add(row, at)) for row in rows_at], columns)
        for i in range(m):
            for j in range(count):
                target = builder.add(out, builder.add(builder.mul(out_step, I64(i)), I64(4 * lanes * j)))
                v.store(builder.load(cells[i][j], typ=v.type), target)
        return context.get_dummy_value()

    return types.void(kv, rows, _INT, _INT, _INT, _INT, _INT, _INT, _INT), emit


@intrinsic(prefer_literal=True)
def weigh_tile(
    typingctx: Any,
    kv: Any,
    rows: Any,
    columns: Any,
    p: Any,
    p_step: Any,
    first: Any,
    last: Any,
    strips: Any,
    offset: Any,
    v_step: Any,
    out: Any,
    out_step: Any,
) -> Any:
    """`out[m, :] = sum over tokens t in first..last-1 of p[m, t] * V[t, :]` for some columns of V.

    Args:
        typingctx: Numba's.
        kv: see the module.
        rows: literal number of rows m.
        columns: literal number of vectors of `lanes` columns.
        p: address of float32 rows, `p_step` bytes apart, one weight per token.
        p_step: see p.
        first: first token.
        last: token after the last.
        strips: address of the addresses of the strips of V; token t is number `t % lanes` of strip `t // lanes`.
        offset: bytes from a token's first column to the first of these.
        v_step: bytes from token to token in a page.
        out: address of float32 rows, `out_step` bytes apart.
        out_step: see out.
    """
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(columns, types.IntegerLiteral):
        return None
    lanes, count = kv.shape
    m, n = rows.literal_value, columns.literal_value
    size = 4 if kv.dtype == FLOAT32 else 2

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _kv, _rows, _columns, p, p_step, first, last, strips, offset, v_step, out, out_step = args
        v = Vectors(builder, lanes)
        rows_at = [builder.add(p, builder.mul(p_step, I64(i))) for i in range(m)]
        cells = grid(builder, v, m, n)
        width = I64(lanes)
        strip_first, strip_last = builder.sdiv(first, width), builder.sdiv(builder.add(last, I64(lanes - 1)), width)
        with cgutils.for_range(builder, strip_last, start=strip_first) as walk:
            strip = walk.index
            start = builder.mul(strip, width)
            low = _larger(builder, builder.sub(first, start), I64(0))
            high = _smaller(builder, builder.sub(last, start), width)
            slot = builder.add(strips, builder.mul(strip, I64(8)))
            base = builder.add(_load_i64(builder, slot, 0), offset)
            ahead = builder.add(_load_i64(builder, slot, count), offset)
            with cgutils.for_range(builder, high, start=low) as loop:
                token = loop.index
                step = builder.mul(token, v_step)
                at = builder.add(base, step)
                values = [v.load(builder.add(at, I64(size * lanes * j)), kv.dtype) for j in range(n)]
                for j in range(0, n, 4 // size):
                    prefetch(builder, builder.add(builder.add(ahead, step), I64(size * lanes * j)))
                weight = builder.mul(builder.add(start, token), I64(4))
                accumulate(builder, v, cells, [v.broadcast(builder.add(row, weight)) for row in rows_at], values)
        for i in range(m):
            for j in range(n):
                target = builder.add(out, builder.add(builder.mul(out_step, I64(i)), I64(4 * lanes * j)))
                v.store(builder.load(cells[i][j], typ=v.type), target)
        return context.get_dummy_value()

    ints = (_INT,) * 9
    return types.void(kv, rows, columns, *ints), emit


@intrinsic(prefer_literal=True)
def softmax_row(
    typingctx: Any, kv: Any, capped: Any, scores: Any, vectors: Any, first: Any, last: Any, cap: Any, stats: Any
) -> Any:
    """Turns a row of scores into `2^(score - max)` in place, 0 outside `first..last-1`; writes (max, sum) to `stats`.

    Args:
        typingctx: Numba's.
        kv: see the module.
        capped: literal 1: scores become `cap * tanh(score)` first.
        scores: address of the float32 row.
        vectors: how many vectors of `lanes` scores.
        first: first token the row sees.
        last: token after the last.
        cap: see capped.
        stats: address of two float32.
    """
    if not isinstance(capped, types.IntegerLiteral):
        return None
    lanes, _count = kv.shape

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _kv, _capped, scores, vectors, first, last, cap, stats = args
        v = Vectors(builder, lanes)
        largest = cgutils.alloca_once_value(builder, v.constant(EMPTY))
        low, high = (v.splat(builder.trunc(edge, I32)) for edge in (first, last))
        with cgutils.for_range(builder, vectors) as loop:
            at = builder.add(scores, builder.mul(loop.index, I64(4 * lanes)))
            x = v.load(at)
            if capped.literal_value:
                x = builder.fmul(v.splat(cap), v.tanh(x))
            token = builder.add(v.iota(), v.splat(builder.trunc(builder.mul(loop.index, I64(lanes)), I32)))
            seen = builder.and_(builder.icmp_signed(">=", token, low), builder.icmp_signed("<", token, high))
            x = builder.select(seen, x, v.constant(float("-inf")))
            v.store(x, at)
            builder.store(v.larger(x, builder.load(largest, typ=v.type)), largest)
        top = v.reduce(builder.load(largest, typ=v.type), v.larger)
        shift = v.splat(top)
        total = cgutils.alloca_once_value(builder, v.constant(0.0))
        with cgutils.for_range(builder, vectors) as loop:
            at = builder.add(scores, builder.mul(loop.index, I64(4 * lanes)))
            e = v.exp2(builder.fsub(v.load(at), shift))
            v.store(e, at)
            builder.store(builder.fadd(builder.load(total, typ=v.type), e), total)
        one = Vectors(builder, 1)
        one.store(top, stats)
        one.store(v.reduce(builder.load(total, typ=v.type), builder.fadd), builder.add(stats, I64(4)))
        return context.get_dummy_value()

    return types.void(kv, capped, _INT, _INT, _INT, _INT, types.float32, _INT), emit


def _load_i64(builder: Any, address: Any, index: int) -> Any:
    return builder.load(builder.inttoptr(builder.add(address, I64(8 * index)), I64.as_pointer()), typ=I64)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)
