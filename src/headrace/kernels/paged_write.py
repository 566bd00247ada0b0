"""The compiled kernel that stores new K and V in pages."""

from typing import Any

import numpy as np
from numba import carray

from headrace.kernels.memory import fetch_add, load_f32, load_i64, store_kv

_NUMBERS = (
    "new_k", "new_v", "k", "v",  # addresses; they come first
    "tickets", "items", "rows", "block", "slots",  # addresses and counts
    "k_row", "k_col", "v_row", "v_col", "k_head", "k_page", "v_head", "v_page",  # bytes
    "page_size", "dim", "padded", "kv_heads",
)  # fmt: skip


def write_record(element: Any) -> np.dtype[Any]:
    """Layout of the argument of `write_kernel`; the type of `kv` says how KV is stored."""
    return np.dtype([*((name, "i8") for name in _NUMBERS), ("kv", element, (1, 1))], align=True)


def write_kernel(argument):  # type: ignore[no-untyped-def]
    """Entry of a thread: stores K (transposed inside a page) and V; `argument` points to one `write_record`."""
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
