"""The register tiles for any number of rows up to `ROWS`: picks the variant that was compiled for that number."""

from numba import njit

from headrace.kernels.tiles import score_tile, weigh_tile

ROWS = 6
"""Query rows per register tile: 6 x 4 accumulators leave registers for the operands (AVX-512; 6 x 2 on AVX2)."""


@njit
def score_rows(a, rows, q, q_step, dim, strips, k_step, out, out_step):  # type: ignore[no-untyped-def]
    """`score_tile` for 1 to `ROWS` rows."""
    if rows == 6:
        score_tile(a.kv, 6, q, q_step, dim, strips, k_step, out, out_step)
    elif rows == 5:
        score_tile(a.kv, 5, q, q_step, dim, strips, k_step, out, out_step)
    elif rows == 4:
        score_tile(a.kv, 4, q, q_step, dim, strips, k_step, out, out_step)
    elif rows == 3:
        score_tile(a.kv, 3, q, q_step, dim, strips, k_step, out, out_step)
    elif rows == 2:
        score_tile(a.kv, 2, q, q_step, dim, strips, k_step, out, out_step)
    else:
        score_tile(a.kv, 1, q, q_step, dim, strips, k_step, out, out_step)


@njit
def _weigh_4(a, rows, p, p_step, first, last, strips, offset, v_step, out, out_step):  # type: ignore[no-untyped-def]
    """`weigh_tile` of four vectors of columns for 1 to `ROWS` rows."""
    if rows == 6:
        weigh_tile(a.kv, 6, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 5:
        weigh_tile(a.kv, 5, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 4:
        weigh_tile(a.kv, 4, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 3:
        weigh_tile(a.kv, 3, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 2:
        weigh_tile(a.kv, 2, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    else:
        weigh_tile(a.kv, 1, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)


@njit
def _weigh_2(a, rows, p, p_step, first, last, strips, offset, v_step, out, out_step):  # type: ignore[no-untyped-def]
    """`weigh_tile` of two vectors of columns for 1 to `ROWS` rows."""
    if rows == 6:
        weigh_tile(a.kv, 6, 2, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 5:
        weigh_tile(a.kv, 5, 2, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 4:
        weigh_tile(a.kv, 4, 2, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 3:
        weigh_tile(a.kv, 3, 2, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 2:
        weigh_tile(a.kv, 2, 2, p, p_step, first, last, strips, offset, v_step, out, out_step)
    else:
        weigh_tile(a.kv, 1, 2, p, p_step, first, last, strips, offset, v_step, out, out_step)


@njit
def _weigh_1(a, rows, p, p_step, first, last, strips, offset, v_step, out, out_step):  # type: ignore[no-untyped-def]
    """`weigh_tile` of one vector of columns for 1 to `ROWS` rows."""
    if rows == 6:
        weigh_tile(a.kv, 6, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 5:
        weigh_tile(a.kv, 5, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 4:
        weigh_tile(a.kv, 4, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 3:
        weigh_tile(a.kv, 3, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif rows == 2:
        weigh_tile(a.kv, 2, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    else:
        weigh_tile(a.kv, 1, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)


@njit
def weigh_rows(a, rows, p, p_step, first, last, strips, columns, size, v_step, out, out_step):  # type: ignore[no-untyped-def]
    """`weigh_tile` over all `columns` (a multiple of the vector) of V, whose elements have `size` bytes."""
    lanes = a.kv.shape[0]
    at = 0
    while at + 4 * lanes <= columns:
        _weigh_4(a, rows, p, p_step, first, last, strips, size * at, v_step, out + 4 * at, out_step)
        at += 4 * lanes
    if at + 2 * lanes <= columns:
        _weigh_2(a, rows, p, p_step, first, last, strips, size * at, v_step, out + 4 * at, out_step)
        at += 2 * lanes
    if at < columns:
        _weigh_1(a, rows, p, p_step, first, last, strips, size * at, v_step, out + 4 * at, out_step)
