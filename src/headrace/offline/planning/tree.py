"""The prefix tree of a job's prompts, as arrays: sorted prompts and the longest common prefixes of neighbours.

Prompts are sorted by their tokens; what a prompt shares with any other it shares with a neighbour, so the neighbours'
common prefixes are the tree. A node is a run of leaves (sorted prompts) that share `depth` tokens; there are fewer
nodes than leaves, whatever the prompts' lengths, and a subtree's sums are differences of prefix sums.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.offline.planning.requests import JobRequests

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PrefixTree:
    """A job's prompts in the order of their tokens, and the nodes above them. Node 0 is the root.

    Attributes:
        leaves: int64 [n], the request at each place of the order.
        shared: int64 [n], tokens that a leaf shares with the leaf before it; 0 for the first.
        parent: int64 [nodes], -1 for the root; parents come before their children.
        depth: int64 [nodes], tokens that all leaves of the node share.
        first, last: int64 [nodes], the node's leaves are `first .. last - 1`.
        above: int64 [n], the lowest node over each leaf.
    """

    leaves: Ints
    shared: Ints
    parent: Ints
    depth: Ints
    first: Ints
    last: Ints
    above: Ints

    @classmethod
    def of(cls, requests: JobRequests, page: int = 1) -> "PrefixTree":
        """The tree of a job.

        Args:
            requests: of the job.
            page: common prefixes count in whole pages of so many tokens, as an engine shares them.
        """
        found = requests.by_tokens
        return cls.from_neighbours(found.leaves, found.common // page * page)

    @classmethod
    def from_neighbours(cls, leaves: Ints, shared: Ints) -> "PrefixTree":
        """The tree of requests in an order where neighbours share so many tokens."""
        return cls(leaves, shared, *_nodes(shared))

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that need no computation when every shared prefix is computed once."""
        return int(self.shared.sum())

    def top(self) -> Ints:
        """For each leaf the child of the root over it; -1 for leaves right below the root."""
        below = np.flatnonzero(self.parent == 0)  # by their first leaves
        places = np.arange(len(self))
        nearest = np.searchsorted(self.first[below], places, "right") - 1
        node = np.append(below, 0)[nearest]  # the 0 stands for "before all of them"
        return np.where((nearest >= 0) & (places < self.last[node]), node, -1)


def borrowed_tokens(tree: PrefixTree, exact: Ints, page: int) -> Ints:
    """Tokens that each request shares with another one beyond whole pages: those of a page that is copied.

    Args:
        tree: of whole pages.
        exact: int64 [n], tokens that each leaf shares with the one before it (`SortedPrompts.common`).
        page: tokens of a page.
    """
    behind = np.append(exact[1:], 0)
    found = np.empty(len(tree), np.int64)
    found[tree.leaves] = np.clip(np.maximum(exact, behind) - tree.depth[tree.above], 0, page - 1)
    return found


def _nodes(shared: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Parent, depth, first, last of all nodes, and the node above each leaf."""
    count = len(shared)
    parent, depth, first, last = [-1], [0], [0], [count]
    above = [0] * count
    stack = [0]  # nodes that are open at the leaf, the lowest last

    def close(place: int, value: int) -> int:
        """End nodes deeper than `value` before this place; returns where the last of them began, or -1."""
        begin = -1
        while depth[stack[-1]] > value:
            node = stack.pop()
            last[node] = place
            begin = first[node]
            if depth[stack[-1]] < value:  # its parent begins with it: made now
                fresh = _add(stack[-1], value, begin)
                parent[node] = fresh
                stack.append(fresh)
        return begin

    def _add(over: int, value: int, begin: int) -> int:
        parent.append(over)
        depth.append(value)
        first.append(begin)
        last.append(count)
        return len(parent) - 1

    values = shared.tolist()
    for place in range(count):
        value = values[place]
        close(place, value)
        if depth[stack[-1]] < value:
            stack.append(_add(stack[-1], value, place - 1))
            above[place - 1] = stack[-1]
        above[place] = stack[-1]
    close(count, 0)
    return _parents_first(parent, depth, first, last, above)


def _parents_first(
    parent: list[int], depth: list[int], first: list[int], last: list[int], above: list[int]
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The same nodes numbered so that a parent comes before its children: by first leaf, then by depth."""
    columns = [np.array(values, np.int64) for values in (parent, depth, first, last)]
    order = np.lexsort((columns[1], columns[2]))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    renamed = columns[0][order]
    renamed[1:] = number[renamed[1:]]
    return renamed, columns[1][order], columns[2][order], columns[3][order], number[np.array(above, np.int64)]


def running_sums(values: Iterable[float] | Floats) -> Floats:
    """Prefix sums with a leading 0, so that the sum of `first .. last-1` is a difference."""
    given = np.asarray(values, np.float64)
    sums = np.zeros(len(given) + 1)
    np.cumsum(given, out=sums[1:])
    return sums
