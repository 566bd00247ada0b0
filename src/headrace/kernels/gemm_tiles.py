"""The inner tile of matrix products by a packed weight, as a Numba intrinsic."""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.kernels.tiles import accumulate, grid, prefetch
from headrace.kernels.vectors import I64, Vectors

_INT = types.int64
_LINE = 64


def tile_rows(lanes: int) -> int:
    """Most rows of a tile: its accumulators, a row of the panel and a factor fill 32 (16 lanes) or 16 registers."""
    return 9 if lanes == 16 else 6


def _switch(builder: Any, value: Any, cases: range, emit: Callable[[int], None]) -> None:
    """Emits the code of each case and chooses by an integer; another value does nothing."""
    done = builder.append_basic_block("done")
    choice = builder.switch(value, done)
    for case in cases:
        block = builder.append_basic_block(f"case{case}")
        choice.add_case(I64(case), block)
        builder.position_at_end(block)
        emit(case)
        builder.branch(done)
    builder.position_at_end(done)


@intrinsic
def product_tile(
    typingctx: Any, kind: Any, rows: Any, vectors: Any, dense: Any,
    x: Any, x_step: Any, panel: Any, depth: Any, y: Any, y_step: Any, plus: Any, plus_step: Any, ahead: Any,
) -> Any:  # fmt: skip
    """`y[m, :] = plus[m, :] + sum over k of x[m, k] * panel[k, :]`, summed in the order of k whatever the rows.

    Args:
        typingctx: Numba's.
        kind: an array whose type alone matters: `shape` is (lanes, vectors of a full panel).
        rows: number of rows m, 1 to `tile_rows(lanes)`.
        vectors: vectors of `lanes` columns in the panel, 1 to that of `kind`.
        dense: not 0: in a full panel, prefetch as many lines per k as the panel has, not one.
        x: address of float32 rows, `x_step` bytes apart.
        x_step: see x.
        panel: address of `[depth, vectors * lanes]` float32.
        depth: number of k.
        y: address of float32 rows, `y_step` bytes apart.
        y_step: see y.
        plus: address of float32 rows, `plus_step` bytes apart (0: the same row for all); may be y itself.
        plus_step: see plus.
        ahead: address from which lines are prefetched into the second-level cache, one after the other.
    """
    lanes, full = kind.shape

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _kind, rows, vectors, dense, *addresses = args

        def of_rows(n: int, lines: int) -> None:
            each = range(1, tile_rows(lanes) + 1)
            _switch(builder, rows, each, lambda m: _tile(builder, lanes, m, n, lines, addresses))

        def of_width(n: int) -> None:
            if n < full:
                of_rows(n, 1)
                return
            with builder.if_else(builder.icmp_signed("!=", dense, I64(0))) as (many, one):
                with many:
                    of_rows(n, n)
                with one:
                    of_rows(n, 1)

        _switch(builder, vectors, range(1, full + 1), of_width)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 12), emit


def _tile(builder: Any, lanes: int, m: int, n: int, lines: int, addresses: list[Any]) -> None:
    x, x_step, panel, depth, y, y_step, plus, plus_step, ahead = addresses
    v = Vectors(builder, lanes)
    width = 4 * lanes
    rows_at = [builder.add(x, builder.mul(x_step, I64(i))) for i in range(m)]
    cells = grid(builder, v, m, n)
    with cgutils.for_range(builder, depth) as loop:
        at = builder.add(panel, builder.mul(loop.index, I64(width * n)))
        columns = [v.load(builder.add(at, I64(width * j))) for j in range(n)]
        next_line = builder.add(ahead, builder.mul(loop.index, I64(_LINE * lines)))
        for line in range(lines):
            prefetch(builder, builder.add(next_line, I64(_LINE * line)))
        k = builder.mul(loop.index, I64(4))
        accumulate(builder, v, cells, [v.broadcast(builder.add(row, k)) for row in rows_at], columns)
    for i in range(m):
        for j in range(n):
            column = I64(width * j)
            given = v.load(builder.add(builder.add(plus, builder.mul(plus_step, I64(i))), column))
            total = builder.fadd(builder.load(cells[i][j], typ=v.type), given)
            v.store(total, builder.add(builder.add(y, builder.mul(y_step, I64(i))), column))
