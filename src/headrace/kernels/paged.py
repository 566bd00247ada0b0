"""The compiled attention kernel: walks a step's work list and runs the tiles.

One call is one layer. Every thread of the team enters `attend_kernel` with the same `attend_record` and takes work
items from an atomic counter until none is left, so a thread whose core is taken by others delays only its own item.

The arithmetic of a row is fixed by its position alone: the context is cut at absolute multiples of `SEGMENT` tokens,
each segment gets its own softmax, and segments are merged in order (flash-decoding, and the rescaling of
FlashAttention-2, with cuts that do not depend on the batch). Which thread computes a segment, with which neighbours,
and whether a sequence is split over threads changes no bit.
"""

from collections import namedtuple
from typing import Any

import numpy as np
from numba import carray, njit

from headrace.kernels.memory import exp2, fetch_add, load_f32, load_i32, load_i64, store_f32, store_i64
from headrace.kernels.tile_rows import ROWS, score_rows, weigh_rows
from headrace.kernels.tiles import softmax_row
from headrace.kernels.vectors import EMPTY

SEGMENT = 256
"""Tokens per softmax segment; a multiple of every page size."""

STATS = 16
"""Float32 numbers kept behind a row's values; the first two are its maximum and sum."""

# Reset by the caller in each call: tickets[0] counts work items, tickets[8] threads.
_NUMBERS = (
    "q", "out", "k", "v", "q_row", "q_head", "out_row", "out_head",  # addresses, bytes
    "k_head", "k_page", "v_head", "v_page",  # bytes
    "tickets", "work", "tiles", "finished", "tables", "partials", "scratch",  # addresses
    "items", "table_step", "scratch_step",  # work entries x kv heads; entries; bytes
    "page_shift", "dim", "padded", "group", "kv_heads", "window", "item_size",
)  # fmt: skip

Scratch = namedtuple("Scratch", ("strips", "scores", "part", "stats", "q", "total"))
"""Addresses of a thread's memory: addresses of strips; scores and results of one register tile, (max, sum) of its rows;
a tile's packed queries; its merged results."""


def attend_record(element: Any, lanes: int, strips: int) -> np.dtype[Any]:
    """Layout of the argument of `attend_kernel`; the type of `kv` selects the machine code.

    Args:
        element: numpy type that stands for the stored KV (see `vectors`).
        lanes: tokens per vector.
        strips: vectors of tokens per register tile.
    """
    fields = [(name, "i8") for name in _NUMBERS]
    return np.dtype([*fields, ("q_scale", "f4"), ("cap", "f4"), ("kv", element, (lanes, strips))], align=True)


def scratch_bytes(lanes: int, strips: int, padded: int, tile_rows: int) -> int:
    """What one thread needs."""
    fixed = 8 * (2 * SEGMENT // lanes + strips) + 64 + 4 * ROWS * (SEGMENT + padded)
    return -(-(fixed + 4 * tile_rows * (2 * padded + STATS)) // 128) * 128 + 128


@njit
def _merge(total, part, part_stats, width):  # type: ignore[no-untyped-def]
    """Adds one segment's weighted values and (max, sum) to a row's total."""
    stats = total + 4 * width
    old, new = load_f32(stats, 0), load_f32(part_stats, 0)
    top = max(old, new)
    keep, take = exp2(old - top), exp2(new - top)
    store_f32(stats, 0, top)
    store_f32(stats, 1, load_f32(stats, 1) * keep + load_f32(part_stats, 1) * take)
    for i in range(width):
        store_f32(total, i, load_f32(total, i) * keep + load_f32(part, i) * take)


@njit
def _clear(total, width):  # type: ignore[no-untyped-def]
    """Makes a row's total that of no tokens."""
    store_f32(total, width, EMPTY)
    store_f32(total, width + 1, 0.0)
    for i in range(width):
        store_f32(total, i, 0.0)


@njit
def _emit(a, row, head, total):  # type: ignore[no-untyped-def]
    """Writes a finished row of the output."""
    inverse = np.float32(1.0) / load_f32(total, a.padded + 1)
    out = a.out + row * a.out_row + head * a.out_head
    for i in range(a.dim):
        store_f32(out, i, load_f32(total, i) * inverse)


@njit
def _range(a, tile, segment):  # type: ignore[no-untyped-def]
    """The positions of a segment that some row of a tile sees."""
    tokens, position = load_i64(tile, 2), load_i64(tile, 3)
    start = segment * SEGMENT
    return max(start, position - a.window + 1), min(start + SEGMENT, position + tokens)


@njit
def _k_strip(a, tile, head, token):  # type: ignore[no-untyped-def]
    """Address of the K strip that begins at a position."""
    page = load_i32(a.tables, load_i64(tile, 0) * a.table_step + (token >> a.page_shift))
    inside = token & ((1 << a.page_shift) - 1)
    return a.k + head * a.k_head + page * a.k_page + inside * a.item_size


@njit
def _v_strip(a, tile, head, token):  # type: ignore[no-untyped-def]
    """Address of the V strip that begins at a position."""
    page = load_i32(a.tables, load_i64(tile, 0) * a.table_step + (token >> a.page_shift))
    inside = token & ((1 << a.page_shift) - 1)
    return a.v + head * a.v_head + page * a.v_page + inside * a.padded * a.item_size


@njit
def _find_strips(a, tile, head, segment, low, high, strips, next_tile, next_head, next_segment):  # type: ignore[no-untyped-def]
    """Lists the strips of a segment: K, then V, then the first ones of what is computed next.

    Tiles prefetch some strips ahead of what they read, so the list is in the order of reading. Block table entries
    outside `low..high-1` may hold anything: where a tile reads such a strip (its scores are masked), another one stands
    in; where it only prefetches, what is read next does.
    """
    lanes, count = a.kv.shape
    n = SEGMENT // lanes
    start = segment * SEGMENT
    first, last = (low - start) // lanes, (high - start - 1) // lanes
    for i in range(first, last + 1):
        store_i64(strips, i, _k_strip(a, tile, head, start + i * lanes))
        store_i64(strips, n + i, _v_strip(a, tile, head, start + i * lanes))
    loaded = (last + count) // count * count
    for i in range(n):
        if i < first:
            store_i64(strips, i, load_i64(strips, first))
            store_i64(strips, n + i, load_i64(strips, n + first))
        elif last < i < loaded:
            store_i64(strips, i, load_i64(strips, last))
        elif i >= loaded:
            store_i64(strips, i, load_i64(strips, n + min(first + i - loaded, last)))
    next_low, next_high = _range(a, next_tile, next_segment)
    for j in range(count):
        token = next_low // lanes * lanes + j * lanes
        if token >= next_high:
            token = next_low // lanes * lanes
        strip = _k_strip(a, next_tile, next_head, token)
        store_i64(strips, n + last + 1 + j, strip)


@njit
def _segment(a, s, tile, head, segment, total, next_tile, next_head, next_segment):  # type: ignore[no-untyped-def]
    """Attends a tile's rows to one segment of the context and merges the result into `total`."""
    lanes, count = a.kv.shape
    low, high = _range(a, tile, segment)
    if low >= high:
        return
    _find_strips(a, tile, head, segment, low, high, s.strips, next_tile, next_head, next_segment)
    position = load_i64(tile, 3)
    rows = load_i64(tile, 2) * a.group
    start = segment * SEGMENT
    wide = lanes * count
    v_strips = s.strips + 8 * (SEGMENT // lanes)
    blocks = (rows + ROWS - 1) // ROWS
    done = 0
    for block in range(blocks):
        m = (rows - done + blocks - block - 1) // (blocks - block)
        first = max(low, position + done // a.group - a.window + 1) - start
        last = min(high, position + (done + m - 1) // a.group + 1) - start
        if first < last:
            begin, end = first // wide, (last + wide - 1) // wide
            for c in range(begin, end):
                score_rows(a, m, s.q + 4 * done * a.padded, 4 * a.padded, a.dim, s.strips + 8 * c * count,
                           a.item_size << a.page_shift, s.scores + 4 * c * wide, 4 * SEGMENT)  # fmt: skip
            for i in range(m):
                seen = position + (done + i) // a.group + 1 - start - begin * wide
                scores = s.scores + 4 * (i * SEGMENT + begin * wide)
                vectors = (end - begin) * count
                if a.cap != 0:
                    softmax_row(a.kv, 1, scores, vectors, seen - a.window, seen, a.cap, s.stats + 8 * i)
                else:
                    softmax_row(a.kv, 0, scores, vectors, seen - a.window, seen, a.cap, s.stats + 8 * i)
            weigh_rows(a, m, s.scores, 4 * SEGMENT, first, last, v_strips, a.padded, a.item_size,
                       a.item_size * a.padded, s.part, 4 * a.padded)  # fmt: skip
            for i in range(m):
                row = total + 4 * (done + i) * (a.padded + STATS)
                _merge(row, s.part + 4 * i * a.padded, s.stats + 8 * i, a.padded)
        done += m


@njit
def _partial(a, tile, head, segment):  # type: ignore[no-untyped-def]
    """Address of the results of a split tile for one head and segment."""
    tokens, base = load_i64(tile, 2), load_i64(tile, 5)
    rows = (base + segment * tokens) * a.kv_heads + head * tokens
    return a.partials + 4 * rows * a.group * (a.padded + STATS)


@njit
def _join(a, s, tile, head):  # type: ignore[no-untyped-def]
    """Merges the parts of a tile that several work items computed; run by the item that ended last."""
    step = 4 * (a.padded + STATS)
    for t in range(load_i64(tile, 2)):
        at = load_i64(tile, 3) + t
        for g in range(a.group):
            _clear(s.total, a.padded)
            for segment in range(max(0, at - a.window + 1) // SEGMENT, at // SEGMENT + 1):
                part = _partial(a, tile, head, segment) + (t * a.group + g) * step
                _merge(s.total, part, part + 4 * a.padded, a.padded)
            _emit(a, load_i64(tile, 1) + t, head * a.group + g, s.total)


@njit
def _pack_queries(a, tile, head, q):  # type: ignore[no-untyped-def]
    """Copies a tile's query rows, scaled, side by side."""
    for t in range(load_i64(tile, 2)):
        for g in range(a.group):
            source = a.q + (load_i64(tile, 1) + t) * a.q_row + (head * a.group + g) * a.q_head
            target = q + 4 * (t * a.group + g) * a.padded
            for i in range(a.dim):
                store_f32(target, i, load_f32(source, i) * a.q_scale)


@njit
def _first_segment(a, tile):  # type: ignore[no-untyped-def]
    """The first segment that a tile sees anything of."""
    return max(0, load_i64(tile, 3) - a.window + 1) // SEGMENT


@njit
def _locate(a, item):  # type: ignore[no-untyped-def]
    """A work item's tile (number, address), head, first segment and the segment after its last."""
    work = a.work + 24 * (item // a.kv_heads)
    number, segment = load_i64(work, 0), load_i64(work, 1)
    tile = a.tiles + 48 * number
    if segment >= 0:
        return number, tile, item % a.kv_heads, segment, segment + 1
    return number, tile, item % a.kv_heads, _first_segment(a, tile), load_i64(tile, 4)


@njit
def _scratch(a):  # type: ignore[no-untyped-def]
    """Divides this thread's memory."""
    lanes, count = a.kv.shape
    strips = a.scratch + fetch_add(a.tickets + 64, 1) * a.scratch_step
    stats = strips + 8 * (2 * SEGMENT // lanes + count)
    scores = (stats + 64 + 63) & ~63
    part = scores + 4 * ROWS * SEGMENT
    q = part + 4 * ROWS * a.padded
    return Scratch(strips, scores, part, stats, q, q)


def attend_kernel(argument):  # type: ignore[no-untyped-def]
    """Entry of a thread; `argument` points to one `attend_record`."""
    a = carray(argument, 1)[0]
    s = _scratch(a)
    item = fetch_add(a.tickets, 1)
    while item < a.items:
        # The next item is taken before this one is done: its first strips are fetched from memory meanwhile.
        following = fetch_add(a.tickets, 1)
        number, tile, head, begin, end = _locate(a, item)
        _number, next_tile, next_head, next_begin, _end = _locate(a, min(following, a.items - 1))
        tokens = load_i64(tile, 2)
        rows = tokens * a.group
        s = Scratch(s.strips, s.scores, s.part, s.stats, s.q, s.q + 4 * rows * a.padded)
        _pack_queries(a, tile, head, s.q)
        split = load_i64(a.work, 3 * (item // a.kv_heads) + 1) >= 0
        total = _partial(a, tile, head, begin) if split else s.total
        for r in range(rows):
            _clear(total + 4 * r * (a.padded + STATS), a.padded)
        for segment in range(begin, end - 1):
            _segment(a, s, tile, head, segment, total, tile, head, segment + 1)
        _segment(a, s, tile, head, end - 1, total, next_tile, next_head, next_begin)
        if not split:
            for r in range(rows):
                _emit(a, load_i64(tile, 1) + r // a.group, head * a.group + r % a.group,
                      total + 4 * r * (a.padded + STATS))  # fmt: skip
        else:
            done = a.finished + 8 * (number * a.kv_heads + head)
            if fetch_add(done, 1) == load_i64(tile, 4) - 1:
                store_i64(done, 0, 0)
                _join(a, s, tile, head)
        item = following
