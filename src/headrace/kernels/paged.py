"""The compiled attention kernel: walks a step's work list and runs the tiles.

One call is one layer. Every thread of the team enters `attend_kernel` with the same `ATTEND` record and takes work items from
an atomic counter until none is left, so a thread that is slow (or whose core is taken) holds up nobody.

The arithmetic of a row is fixed by its position alone: the context is cut at absolute multiples of `SEGMENT` tokens, each
segment gets its own softmax, and segments are merged in order (as in flash-decoding and FlashAttention-2, but with the
cuts independent of the batch). Which thread computes a segment, with which neighbours, and whether a sequence is split over
threads changes no bit.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from headrace.kernels.memory import exp2, fetch_add, load_f32, load_i32, load_i64, store_f32, store_i64, store_kv
from headrace.kernels.tiles import score_tile, softmax_row, weigh_tile
from headrace.kernels.vectors import EMPTY

SEGMENT = 256
"""Tokens per softmax segment; a multiple of every page size."""

ROWS = 6
"""Query rows per register tile."""

_I64 = "i8"
_F32 = "f4"
_ADDRESSES = ("tickets", "work", "tiles", "finished", "tables", "q", "out", "k", "v", "partials", "scratch")
_NUMBERS = (
    "items",  # work entries x kv heads
    "table_step",  # entries from one sequence's block table to the next
    "q_row", "q_head", "out_row", "out_head",  # bytes
    "k_head", "k_page", "v_head", "v_page",  # bytes from head to head and page to page
    "page_size", "dim", "padded", "group", "kv_heads", "window", "scratch_step", "item_size",
)  # fmt: skip


def attend_record(element: Any, lanes: int, strips: int) -> np.dtype[Any]:
    """Layout of the argument of `attend_kernel`; the type of `kv` selects the machine code.

    Args:
        element: numpy type that stands for the stored KV (see `vectors`).
        lanes: tokens per vector.
        strips: vectors of tokens per register tile.
    """
    fields = [(name, _I64) for name in _ADDRESSES + _NUMBERS]
    return np.dtype([*fields, ("q_scale", _F32), ("cap", _F32), ("kv", element, (lanes, strips))], align=True)


def write_record(element: Any) -> np.dtype[Any]:
    """Layout of the argument of `write_kernel`."""
    names = (
        "tickets", "items", "rows", "block", "slots", "new_k", "new_v", "k", "v", "k_row", "k_col", "v_row", "v_col",
        "k_head", "k_page", "v_head", "v_page", "page_size", "dim", "padded", "kv_heads",
    )  # fmt: skip
    return np.dtype([*((name, _I64) for name in names), ("kv", element, (1, 1))], align=True)


@njit
def _score(kv, m, q, q_step, dim, strips, k_step, out, out_step):  # type: ignore[no-untyped-def]
    """`score_tile` for 1 to `ROWS` rows."""
    if m == 6:
        score_tile(kv, 6, q, q_step, dim, strips, k_step, out, out_step)
    elif m == 5:
        score_tile(kv, 5, q, q_step, dim, strips, k_step, out, out_step)
    elif m == 4:
        score_tile(kv, 4, q, q_step, dim, strips, k_step, out, out_step)
    elif m == 3:
        score_tile(kv, 3, q, q_step, dim, strips, k_step, out, out_step)
    elif m == 2:
        score_tile(kv, 2, q, q_step, dim, strips, k_step, out, out_step)
    else:
        score_tile(kv, 1, q, q_step, dim, strips, k_step, out, out_step)


@njit
def _weigh4(kv, m, p, p_step, first, last, strips, offset, v_step, out, out_step):  # type: ignore[no-untyped-def]
    """`weigh_tile` of four vectors of columns for 1 to `ROWS` rows."""
    if m == 6:
        weigh_tile(kv, 6, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif m == 5:
        weigh_tile(kv, 5, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif m == 4:
        weigh_tile(kv, 4, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif m == 3:
        weigh_tile(kv, 3, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif m == 2:
        weigh_tile(kv, 2, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)
    else:
        weigh_tile(kv, 1, 4, p, p_step, first, last, strips, offset, v_step, out, out_step)


@njit
def _weigh1(kv, m, p, p_step, first, last, strips, offset, v_step, out, out_step):  # type: ignore[no-untyped-def]
    """`weigh_tile` of one vector of columns for 1 to `ROWS` rows."""
    if m == 6:
        weigh_tile(kv, 6, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif m == 5:
        weigh_tile(kv, 5, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif m == 4:
        weigh_tile(kv, 4, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif m == 3:
        weigh_tile(kv, 3, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    elif m == 2:
        weigh_tile(kv, 2, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)
    else:
        weigh_tile(kv, 1, 1, p, p_step, first, last, strips, offset, v_step, out, out_step)


@njit
def _merge(total, stats, part, part_stats, width):  # type: ignore[no-untyped-def]
    """Adds one segment's (max, sum) and weighted values to a row's total."""
    old, new = load_f32(stats, 0), load_f32(part_stats, 0)
    top = max(old, new)
    keep, take = exp2(old - top), exp2(new - top)
    store_f32(stats, 0, top)
    store_f32(stats, 1, load_f32(stats, 1) * keep + load_f32(part_stats, 1) * take)
    for i in range(width):
        store_f32(total, i, load_f32(total, i) * keep + load_f32(part, i) * take)


@njit
def _clear(total, stats, width):  # type: ignore[no-untyped-def]
    """Makes a row's total that of no tokens."""
    store_f32(stats, 0, EMPTY)
    store_f32(stats, 1, 0.0)
    for i in range(width):
        store_f32(total, i, 0.0)


@njit
def _emit(a, row, head, total, stats):  # type: ignore[no-untyped-def]
    """Writes a finished row of the output."""
    inverse = np.float32(1.0) / load_f32(stats, 1)
    out = a.out + row * a.out_row + head * a.out_head
    for i in range(a.dim):
        store_f32(out, i, load_f32(total, i) * inverse)


@njit
def _find_strips(a, table, head, start, low, high, k_strips, v_strips):  # type: ignore[no-untyped-def]
    """Addresses of the strips of a segment that begins at `start`; those without a token in `low..high-1` get some valid
    address (their entries of the block table may hold anything)."""
    lanes, count = a.kv.shape
    spare = np.int64(-1)
    for pass_ in range(2):
        for i in range(SEGMENT // lanes + 2 * count):
            token = start + i * lanes
            known = i < SEGMENT // lanes and token + lanes > low and token < high
            if known and pass_ == 0:
                page = load_i32(table, token // a.page_size)
                inside = token % a.page_size
                k = a.k + head * a.k_head + page * a.k_page + inside * a.item_size
                v = a.v + head * a.v_head + page * a.v_page + inside * a.padded * a.item_size
                store_i64(k_strips, i, k)
                store_i64(v_strips, i, v)
                if spare < 0:
                    spare = i
            elif not known and pass_ == 1:
                store_i64(k_strips, i, load_i64(k_strips, spare))
                store_i64(v_strips, i, load_i64(v_strips, spare))


@njit
def _segment(a, tile, head, segment, q, k_strips, v_strips, p, part, part_stats, total, stats, step):  # type: ignore[no-untyped-def]
    """Attends a tile's rows to one segment of the context and merges the result into `total`."""
    lanes, count = a.kv.shape
    tokens, position = load_i64(tile, 2), load_i64(tile, 3)
    rows = tokens * a.group
    start = segment * SEGMENT
    low = max(start, position - a.window + 1)
    high = min(start + SEGMENT, position + tokens)
    if low >= high:
        return
    table = a.tables + 4 * load_i64(tile, 0) * a.table_step
    _find_strips(a, table, head, start, low, high, k_strips, v_strips)
    itemsize = a.item_size
    k_step = itemsize * a.page_size
    v_step = itemsize * a.padded
    blocks = (rows + ROWS - 1) // ROWS
    done = 0
    for block in range(blocks):
        m = (rows - done + blocks - block - 1) // (blocks - block)
        at, end = position + done // a.group, position + (done + m - 1) // a.group
        first = max(low, at - a.window + 1) - start
        last = min(high, end + 1) - start
        if first < last:
            wide = lanes * count
            begin = first // wide
            for c in range(begin, (last + wide - 1) // wide):
                _score(a.kv, m, q + 4 * done * a.padded, 4 * a.padded, a.dim, k_strips + 8 * c * count, k_step,
                       p + 4 * c * wide, 4 * SEGMENT)  # fmt: skip
            for i in range(m):
                row = position + (done + i) // a.group - start
                begin_row = p + 4 * (i * SEGMENT + begin * wide)
                vectors = ((last + wide - 1) // wide - begin) * count
                if a.cap != 0:
                    softmax_row(a.kv, 1, begin_row, vectors, row - a.window + 1 - begin * wide, row + 1 - begin * wide,
                                a.cap, part_stats + 8 * i)  # fmt: skip
                else:
                    softmax_row(a.kv, 0, begin_row, vectors, row - a.window + 1 - begin * wide, row + 1 - begin * wide,
                                a.cap, part_stats + 8 * i)  # fmt: skip
            column = 0
            while column + 4 * lanes <= a.padded:
                _weigh4(a.kv, m, p, 4 * SEGMENT, first, last, v_strips, itemsize * column, v_step, part + 4 * column,
                        4 * a.padded)  # fmt: skip
                column += 4 * lanes
            while column < a.padded:
                _weigh1(a.kv, m, p, 4 * SEGMENT, first, last, v_strips, itemsize * column, v_step, part + 4 * column,
                        4 * a.padded)  # fmt: skip
                column += lanes
            for i in range(m):
                _merge(total + (done + i) * step, stats + (done + i) * step, part + 4 * i * a.padded, part_stats + 8 * i,
                       a.padded)  # fmt: skip
        done += m


@njit
def _finish_split(a, tile, head, total):  # type: ignore[no-untyped-def]
    """Merges the parts of a tile that several work items computed; run by the item that came last."""
    tokens, position = load_i64(tile, 2), load_i64(tile, 3)
    segments, base = load_i64(tile, 4), load_i64(tile, 5)
    step = 4 * (a.padded + 2)
    row_step = a.kv_heads * a.group * step
    stats = total + 4 * a.padded
    for t in range(tokens):
        at = position + t
        for g in range(a.group):
            _clear(total, stats, a.padded)
            h = head * a.group + g
            for segment in range(max(0, at - a.window + 1) // SEGMENT, at // SEGMENT + 1):
                part = a.partials + (base + segment * tokens + t) * row_step + h * step
                _merge(total, stats, part, part + 4 * a.padded, a.padded)
            _emit(a, load_i64(tile, 1) + t, h, total, stats)


@njit
def _pack_queries(a, tile, head, q):  # type: ignore[no-untyped-def]
    """Copies a tile's query rows, scaled, side by side."""
    for t in range(load_i64(tile, 2)):
        for g in range(a.group):
            source = a.q + (load_i64(tile, 1) + t) * a.q_row + (head * a.group + g) * a.q_head
            target = q + 4 * (t * a.group + g) * a.padded
            for i in range(a.dim):
                store_f32(target, i, load_f32(source, i) * a.q_scale)


def attend_kernel(argument):  # type: ignore[no-untyped-def]
    """Entry of a thread; `argument` points to one `attend_record`."""
    a = carray(argument, 1)[0]
    lanes, count = a.kv.shape
    mine = a.scratch + fetch_add(a.tickets + 64, 1) * a.scratch_step
    k_strips = mine
    v_strips = k_strips + 8 * (SEGMENT // lanes + 2 * count)
    p = v_strips + 8 * (SEGMENT // lanes + 2 * count)
    part = p + 4 * ROWS * SEGMENT
    part_stats = part + 4 * ROWS * a.padded
    q = part_stats + 64
    step = 4 * (a.padded + 2)
    while True:
        item = fetch_add(a.tickets, 1)
        if item >= a.items:
            break
        work, head = a.work + 24 * (item // a.kv_heads), item % a.kv_heads
        number, segment = load_i64(work, 0), load_i64(work, 1)
        tile = a.tiles + 48 * number
        tokens, position = load_i64(tile, 2), load_i64(tile, 3)
        rows = tokens * a.group
        total = q + 4 * rows * a.padded
        _pack_queries(a, tile, head, q)
        if segment < 0:
            for r in range(rows):
                _clear(total + r * step, total + r * step + 4 * a.padded, a.padded)
            lowest = max(0, position - a.window + 1) // SEGMENT
            for s in range(lowest, load_i64(tile, 4)):
                _segment(
                    a, tile, head, s, q, k_strips, v_strips, p, part, part_stats, total, total + 4 * a.padded, step
                )
            for r in range(rows):
                _emit(a, load_i64(tile, 1) + r // a.group, head * a.group + r % a.group, total + r * step,
                      total + r * step + 4 * a.padded)  # fmt: skip
        else:
            for r in range(rows):
                _clear(total + r * step, total + r * step + 4 * a.padded, a.padded)
            _segment(
                a, tile, head, segment, q, k_strips, v_strips, p, part, part_stats, total, total + 4 * a.padded, step
            )
            base = load_i64(tile, 5) + segment * tokens
            for r in range(rows):
                h = head * a.group + r % a.group
                target = a.partials + ((base + r // a.group) * a.kv_heads * a.group + h) * step
                for i in range(a.padded + 2):
                    store_f32(target, i, load_f32(total + r * step, i))
            done = a.finished + 8 * (number * a.kv_heads + head)
            if fetch_add(done, 1) == load_i64(tile, 4) - 1:
                store_i64(done, 0, 0)
                _finish_split(a, tile, head, total)


def write_kernel(argument):  # type: ignore[no-untyped-def]
    """Stores new K (transposed inside a page) and V; `argument` points to one `write_record`."""
    a = carray(argument, 1)[0]
    while True:
        item = fetch_add(a.tickets, 1)
        if item >= a.items:
            break
        head = item % a.kv_heads
        first = (item // a.kv_heads) * a.block
        for t in range(first, min(first + a.block, a.rows)):
            slot = load_i64(a.slots, t)
            if slot >= 0:
                page, inside = slot // a.page_size, slot % a.page_size
                k = a.k + head * a.k_head + page * a.k_page
                v = a.v + head * a.v_head + page * a.v_page
                new_k = a.new_k + t * a.k_row + head * a.k_col
                new_v = a.new_v + t * a.v_row + head * a.v_col
                for i in range(a.dim):
                    store_kv(a.kv, k, i * a.page_size + inside, load_f32(new_k, i))
                    store_kv(a.kv, v, inside * a.padded + i, load_f32(new_v, i))
