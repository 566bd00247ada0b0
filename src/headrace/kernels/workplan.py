"""Cuts a step's attention into work items for the compiled kernel."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.kernels.paged import SEGMENT

TILE_ROWS = 48
"""Query rows (tokens x heads of a group) that share one pass over KV; at least one token."""

_SPLIT_TOKENS = 4
"""Tiles of at most this many tokens (decode) are split over the context always: their partial results are small."""

_ITEMS_PER_THREAD = 8
"""Fewer work items than this make larger tiles be split as well, so that the threads stay even."""


@dataclass(slots=True)
class NumbaStep:
    """A step's work list.

    Attributes:
        rows: packed rows.
        group: query heads per kv head.
        block_tables: `[n, max_pages]`.
        slots: `[rows]`.
        tiles: `[tiles, 6]`: sequence, first packed row, tokens, position of the first, segments, first partial row.
        work: `[entries, 3]`: tile, segment or -1 for all of them, cost; in falling order of cost. Each is done per kv
            head.
        partial_rows: rows of partial results per head.
        longest: tokens of the longest context.
        buffers: scratch memory, made when the head sizes are known.
        calls: prepared kernel arguments, by what they depend on.
    """

    rows: int
    group: int
    block_tables: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    tiles: npt.NDArray[np.int64]
    work: npt.NDArray[np.int64]
    partial_rows: int
    longest: int
    buffers: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    calls: dict[Any, Any] = field(default_factory=dict)

    def buffer(self, name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
        """A zeroed array of at least `size` elements that lives as long as the step."""
        found = self.buffers.get(name)
        if found is None or found.size < size:
            found = self.buffers[name] = np.zeros(size, dtype)
        return found


def cut(
    cu_q: npt.NDArray[np.int32],
    kv_lens: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int64],
    group: int,
    threads: int,
) -> NumbaStep:
    """The work list of a step; arguments as in `AttentionBackend.plan`."""
    tile_tokens = max(1, TILE_ROWS // group)
    lengths = np.diff(cu_q).astype(np.int64)
    per_sequence = -(-lengths // tile_tokens)
    owner = np.repeat(np.arange(len(lengths)), per_sequence)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
    first = nth * tile_tokens
    tokens = np.minimum(lengths[owner] - first, tile_tokens)
    position = kv_lens[owner].astype(np.int64) - lengths[owner] + first
    segments = -(-(position + tokens) // SEGMENT)

    split = tokens <= _SPLIT_TOKENS
    if np.where(split, segments, 1).sum() < _ITEMS_PER_THREAD * threads:
        split = segments > 1
    split &= segments > 1
    entries = np.where(split, segments, 1)
    tile = np.repeat(np.arange(len(owner)), entries)
    segment = np.arange(len(tile)) - np.repeat(np.cumsum(entries) - entries, entries)
    segment = np.where(split[tile], segment, -1)
    partial = np.where(split, tokens * segments, 0)
    cost = tokens[tile] * np.where(split[tile], 1, segments[tile])
    order = np.argsort(-cost, kind="stable")

    tiles = np.stack([owner, cu_q[owner] + first, tokens, position, segments, np.cumsum(partial) - partial], axis=1)
    work = np.stack([tile, segment, cost], axis=1)[order]
    return NumbaStep(
        rows=int(cu_q[-1]),
        group=group,
        block_tables=np.ascontiguousarray(block_tables, np.int32),
        slots=np.ascontiguousarray(slots, np.int64),
        tiles=np.ascontiguousarray(tiles, np.int64),
        work=np.ascontiguousarray(work, np.int64),
        partial_rows=int(partial.sum()),
        longest=int(kv_lens[lengths > 0].max(initial=0)),
    )
