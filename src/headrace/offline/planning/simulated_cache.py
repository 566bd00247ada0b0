"""The KV pool of a simulated engine: shared prefixes as tree nodes, least recently used ones given up first."""

from collections import deque

from headrace.offline.planning.tree import PrefixTree


class SimulatedCache:
    """Tokens of KV, who holds them, and what is kept although nobody does.

    A node of the prefix tree is kept or dropped as a whole. What a finished request leaves behind beyond its shared
    prefix (the end of its prompt, its output) is kept too until room is needed, as an engine keeps it: it cannot know
    that nobody will ask for it.

    Args:
        tree: of the job's prompts.
        capacity: tokens of the pool.
    """

    def __init__(self, tree: PrefixTree, capacity: int) -> None:
        nodes = len(tree.parent)
        self._parent = tree.parent.tolist()
        self._depth = tree.depth.tolist()
        self._above = [0] * len(tree)
        for place, request in enumerate(tree.leaves.tolist()):
            self._above[request] = int(tree.above[place])
        self._present = [False] * nodes
        self._present[0] = True
        self._users = [0] * nodes  # running requests below, and present children
        self._stamp = [0] * nodes
        self._clock = 0
        self._idle: deque[tuple[int, int, int]] = deque()  # (node or -1, stamp, tokens), least recently used first
        self.capacity = capacity
        self.held = 0
        self.idle_tokens = 0

    @property
    def room(self) -> int:
        """Tokens that can be taken, what nobody holds being given up."""
        return self.capacity - self.held

    def missing(self, request: int) -> tuple[int, int]:
        """Of a request's shared prefix: tokens that are here, and tokens that would have to be taken for the rest."""
        node = self._above[request]
        top = self._depth[node]
        while not self._present[node]:
            node = self._parent[node]
        return self._depth[node], top - self._depth[node]

    def revived(self, request: int) -> int:
        """Tokens of a request's shared prefix that are here but held by nobody: holding them takes room."""
        node, tokens = self._above[request], 0
        while node > 0:
            if self._present[node] and self._users[node] == 0:
                tokens += self._depth[node] - self._depth[self._parent[node]]
            node = self._parent[node]
        return tokens

    def hold(self, request: int) -> None:
        """A request begins: its shared prefix is held; what was missing of it is taken."""
        node = self._above[request]
        fresh = True  # whether the node below was not there, and so is a new child of this one
        while node > 0 and fresh:
            size = self._depth[node] - self._depth[self._parent[node]]
            idle = self._users[node] == 0
            self._users[node] += 1
            fresh = not self._present[node] or idle
            if not self._present[node]:
                self._present[node] = True
                self.take(size)
            elif idle:
                self.idle_tokens -= size
                self.held += size
            node = self._parent[node]

    def release(self, request: int, own: int) -> None:
        """A request has ended; `own` tokens beyond its shared prefix nobody holds any more."""
        self._clock += 1
        self.held -= own
        self.idle_tokens += own
        self._idle.append((-1, self._clock, own))
        node = self._above[request]
        while node > 0:
            self._users[node] -= 1
            if self._users[node]:
                return
            size = self._depth[node] - self._depth[self._parent[node]]
            self._stamp[node] = self._clock
            self.held -= size
            self.idle_tokens += size
            self._idle.append((node, self._clock, size))
            node = self._parent[node]

    def take(self, tokens: int) -> None:
        """Take tokens; the caller has seen that there is room."""
        self.held += tokens
        while self.held + self.idle_tokens > self.capacity:
            node, stamp, size = self._idle.popleft()
            if node >= 0:
                if self._users[node] or self._stamp[node] != stamp or not self._present[node]:
                    continue  # used since
                self._present[node] = False
                self.idle_tokens -= size
                continue
            over = min(size, self.held + self.idle_tokens - self.capacity)
            self.idle_tokens -= over
            if over < size:
                self._idle.appendleft((-1, stamp, size - over))
