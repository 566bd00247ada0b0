"""A job's prompts in the order of their tokens, and what neighbours share, without a copy of all tokens.

Prompts are compared block by block: those that no block has told apart yet are sorted by their next one. What is in
memory at once is a block of each of them, so the tokens themselves may lie in a mapped file of any size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Tokens = NDArray[np.int32]

#: Tokens of all blocks that are looked at together (64 MiB), and of one of them.
_TOGETHER = 1 << 24
_FEWEST, _MOST = 4, 64


@dataclass(frozen=True)
class SortedPrompts:
    """Prompts in lexicographic order; a prompt comes before its continuations, equal ones stay in the job's order.

    Attributes:
        leaves: int64 [n], the request at each place of the order.
        common: int64 [n], tokens that each shares with the one before it; 0 for the first. At least one token of every
            prompt is computed, since its logits are needed: of two equal prompts the second shares all but the last.
    """

    leaves: Ints
    common: Ints

    @property
    def saved(self) -> Ints:
        """int64 [n], by request: prompt tokens that perfect prefix sharing leaves out."""
        found = np.empty(len(self.leaves), np.int64)
        found[self.leaves] = self.common
        return found


def sort_prompts(tokens: Tokens, offsets: Ints) -> SortedPrompts:
    """Sort the prompts of a job.

    Args:
        tokens: int32, all prompts one after another, none of them empty; may be mapped from a file.
        offsets: int64 [n + 1], where each prompt begins; the last is the number of tokens.
    """
    count = len(offsets) - 1
    leaves, common = np.arange(count), np.zeros(count, np.int64)
    lengths = np.diff(offsets)
    places = np.arange(count) if count > 1 else np.zeros(0, np.int64)  # of prompts that are not told apart yet
    group = np.zeros(len(places), np.int64)  # those that share all so far, numbered in their order
    depth = 0  # tokens compared so far
    while len(places):
        width = int(np.clip(_TOGETHER // len(places), _FEWEST, _MOST))
        members = leaves[places]
        rows = _blocks(tokens, offsets[members] + depth, lengths[members] - depth, width)
        _sort_mixed(rows, members, group)
        leaves[places] = members
        kin = group[1:] == group[:-1]
        differs = rows[1:] != rows[:-1]
        apart = differs.any(axis=1)
        told = np.flatnonzero(kin & apart)
        common[places[told + 1]] = depth + differs[told].argmax(axis=1)
        ended = rows[1:, -1] == 0
        equal = np.flatnonzero(kin & ~apart & ended)
        common[places[equal + 1]] = lengths[members[equal + 1]] - 1
        on = kin & ~apart & ~ended  # with the one before
        group = np.concatenate(([0], np.cumsum(~on)))
        left = np.append(False, on) | np.append(on, False)
        places, group = places[left], group[left]
        depth += width
    return SortedPrompts(leaves, common)


def _blocks(tokens: Tokens, begins: Ints, left: Ints, width: int) -> Tokens:
    """int32 [n, width], the next tokens of each prompt plus 1; 0 behind its end."""
    width = min(width, len(tokens))
    last = len(tokens) - width
    rows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), width)[np.minimum(begins, last)] + np.int32(1)
    for late in np.flatnonzero(begins > last).tolist():  # at the end of all tokens: at most `width` prompts
        shift = int(begins[late]) - last
        rows[late] = np.append(rows[late, shift:], np.zeros(min(shift, width), np.int32))
    rows[np.arange(width) >= left[:, None]] = 0
    return rows


def _sort_mixed(rows: Tokens, members: Ints, group: Ints) -> None:
    """Sort rows, and members with them, within the groups whose rows are not all equal; in place."""
    mixed = np.zeros(int(group[-1]) + 1, bool)
    mixed[group[1:][(group[1:] == group[:-1]) & (rows[1:] != rows[:-1]).any(axis=1)]] = True
    chosen = np.flatnonzero(mixed[group])
    if len(chosen):
        # Most significant byte first, so that bytes compare as tokens do.
        keys = np.empty((len(chosen), 1 + rows.shape[1]), ">u4")
        keys[:, 0], keys[:, 1:] = group[chosen], rows[chosen]
        order = chosen[np.argsort(keys.view(f"S{keys[0].nbytes}").reshape(-1), kind="stable")]
        rows[chosen], members[chosen] = rows[order], members[order]
