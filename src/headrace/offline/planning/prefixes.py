"""Which shared prefixes running requests hold, and what a further request would add."""

import numpy as np

from headrace.offline.planning.tree import Floats, PrefixTree


class HeldPrefixes:
    """Counts users of the prefix tree's nodes: a prefix that several running requests share takes its room once.

    Attributes:
        tokens: of all shared prefixes in use.
        unique: float64 [n], prompt tokens of each request below the tree's lowest node over it.
    """

    def __init__(self, tree: PrefixTree, prompts: Floats) -> None:
        self.tokens = 0
        self._parent: list[int] = tree.parent.tolist()
        self._depth: list[int] = tree.depth.tolist()
        above = np.zeros(len(tree), np.int64)
        above[tree.leaves] = tree.above
        self._above: list[int] = above.tolist()
        self._users = [0] * len(self._parent)
        # A prompt that is wholly a prefix of others computes its last token nevertheless.
        self.unique: Floats = np.maximum(prompts - tree.depth[above], 1.0)

    def missing(self, request: int) -> int:
        """Tokens of a request's shared prefix that nobody holds."""
        node = self._above[request]
        deepest = self._depth[node]
        while node and not self._users[node]:
            node = self._parent[node]
        return deepest - self._depth[node]

    def hold(self, request: int) -> None:
        """A request begins."""
        node = self._above[request]
        while node:
            self._users[node] += 1
            if self._users[node] > 1:
                return
            parent = self._parent[node]
            self.tokens += self._depth[node] - self._depth[parent]
            node = parent

    def release(self, request: int) -> None:
        """A request has ended."""
        node = self._above[request]
        while node:
            self._users[node] -= 1
            if self._users[node]:
                return
            parent = self._parent[node]
            self.tokens -= self._depth[node] - self._depth[parent]
            node = parent
