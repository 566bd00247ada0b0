"""A prefix tree's leaves by compute density: children sorted, outliers split off where little sharing is lost."""

from dataclasses import dataclass

import numpy as np

from headrace.offline.planning.tree import Floats, Ints, PrefixTree, running_sums
from headrace.perf.density import CostRates

#: Share of the tree's saved tokens that splitting must leave.
KEEP = 0.99
#: A leaf is an outlier when its density is so many times that of the subtree it hangs in, or less by as much (own).
OUTLIER = 2.0
_ROUNDS = 4


@dataclass(frozen=True)
class DensityOrder:
    """Requests from the most compute-heavy to the most memory-heavy, subtrees kept together.

    Attributes:
        requests: int64 [n].
        shared: int64 [n], tokens each shares with the tree's part before it in this order.
        compute, memory: float64 [n], seconds each adds.
        saved_tokens: prompt tokens saved by sharing within the tree as it is after splitting.
        split: requests that were moved to the root.
    """

    requests: Ints
    shared: Ints
    compute: Floats
    memory: Floats
    saved_tokens: int
    split: Ints


def order_by_density(
    tree: PrefixTree, compute: Floats, memory: Floats, rates: CostRates, keep: float = KEEP
) -> DensityOrder:
    """Sort, split, sort (BlendServe, section on the resource-aware prefix tree).

    Args:
        tree: of the job.
        compute: seconds of each request (by its number) on its own, without sharing.
        memory: seconds of each request.
        rates: what a shared prefix would cost to compute.
        keep: share of the tree's saved tokens that must be left after splitting.
    """
    budget = (1 - keep) * tree.saved_tokens
    split: list[int] = []
    for _ in range(_ROUNDS):
        chosen = _outliers(tree, compute[tree.leaves], memory[tree.leaves], rates, budget, np.array(split, np.int64))
        if not len(chosen):
            break
        budget -= float(tree.depth[tree.above[chosen]].sum())
        split += tree.leaves[chosen].tolist()
        tree = _moved_to_root(tree, chosen)
    return _sorted(tree, compute[tree.leaves], memory[tree.leaves], rates, np.array(split, np.int64))


def subtree_costs(tree: PrefixTree, compute: Floats, memory: Floats, rates: CostRates) -> tuple[Floats, Floats]:
    """Seconds (compute, memory) that each node adds beside its siblings: with what it shares inside, and with them.

    Args:
        tree: any.
        compute, memory: of its leaves, in their order, without sharing.
        rates: what a prefix costs to compute.
    """
    saved = running_sums(rates.prefix(tree.shared))
    inside = running_sums(compute)
    own = inside[tree.last] - inside[tree.first] - (saved[tree.last] - saved[np.minimum(tree.first + 1, tree.last)])
    own[1:] -= rates.prefix(tree.depth[tree.parent[1:]])
    total = running_sums(memory)
    return np.maximum(own, 0.0), total[tree.last] - total[tree.first]


def _leaf_costs(tree: PrefixTree, compute: Floats, rates: CostRates) -> Floats:
    return np.maximum(compute - rates.prefix(tree.depth[tree.above]), 0.0)


def _log_density(compute: Floats, memory: Floats) -> Floats:
    tiny = 1e-12
    return np.asarray(np.log(np.maximum(compute, tiny)) - np.log(np.maximum(memory, tiny)), np.float64)


def _outliers(tree: PrefixTree, compute: Floats, memory: Floats, rates: CostRates, budget: float, done: Ints) -> Ints:
    """Leaves to move to the root: those whose density is far from their top subtree's; best gain per token first."""
    top = tree.top()
    own = _leaf_costs(tree, compute, rates)
    density = _log_density(own, memory)
    # Against the mean of the leaves, each counted once: the subtree's own density is the outlier's where that is large.
    subtree = np.maximum(top, 0)
    usual = np.bincount(subtree, density) / np.maximum(np.bincount(subtree), 1)
    distance = np.abs(density - usual[subtree])
    cost = tree.depth[tree.above].astype(np.float64)
    able = (top >= 0) & (distance > np.log(OUTLIER)) & ~np.isin(tree.leaves, done)
    places = np.flatnonzero(able)
    gain = distance[places] * (own[places] + memory[places]) / cost[places]
    places = places[np.argsort(-gain, kind="stable")]
    return np.sort(places[np.cumsum(cost[places]) <= budget])


def _moved_to_root(tree: PrefixTree, places: Ints) -> PrefixTree:
    """The tree with these leaves right below the root, after all others."""
    moved = np.zeros(len(tree), bool)
    moved[places] = True
    kept = np.flatnonzero(~moved)
    shared = np.zeros(len(tree), np.int64)
    if len(kept):
        # What two leaves share is the least of what the neighbours between them share.
        shared[: len(kept)] = np.minimum.reduceat(tree.shared, np.concatenate(([0], kept[:-1] + 1)))[: len(kept)]
        shared[0] = 0
    return PrefixTree.from_neighbours(np.concatenate((tree.leaves[kept], tree.leaves[places])), shared)


def _sorted(tree: PrefixTree, compute: Floats, memory: Floats, rates: CostRates, split: Ints) -> DensityOrder:
    """Leaves in the order of a walk that takes the densest child first."""
    nodes, leaves = len(tree.parent), len(tree)
    own = _leaf_costs(tree, compute, rates)
    node_compute, node_memory = subtree_costs(tree, compute, memory, rates)
    # All children, nodes (but the root) and then leaves, by parent and falling density.
    over = np.concatenate((tree.parent[1:], tree.above))
    size = np.concatenate((tree.last[1:] - tree.first[1:], np.ones(leaves, np.int64)))
    falling = -np.concatenate((_log_density(node_compute, node_memory)[1:], _log_density(own, memory)))
    order = np.lexsort((np.arange(len(over)), falling, over))
    before = running_sums(size[order])[:-1].astype(np.int64)
    begins = np.searchsorted(over[order], np.arange(nodes))  # where each parent's children begin in `order`
    offset = np.empty(len(over), np.int64)
    offset[order] = before - before[np.minimum(begins, len(over) - 1)][over[order]]
    ahead = np.concatenate(([0], offset[: nodes - 1]))  # leaves of a node's parent that come before the node
    start, head = _down_the_tree(tree, ahead)
    place = start[tree.above] + offset[nodes - 1 :]
    shared = np.where(offset[nodes - 1 :] > 0, tree.depth[tree.above], head[tree.above])
    walk = np.empty(leaves, np.int64)
    walk[place] = np.arange(leaves)
    return DensityOrder(
        requests=tree.leaves[walk],
        shared=shared[walk],
        compute=np.maximum(compute[walk] - rates.prefix(shared[walk]), 0.0),
        memory=memory[walk],
        saved_tokens=tree.saved_tokens,
        split=split,
    )


def _down_the_tree(tree: PrefixTree, ahead: Ints) -> tuple[Ints, Ints]:
    """Where each node begins in the walk, and the tokens its first leaf shares with what comes before it there.

    Both hang on all nodes above; each round looks twice as far up as the one before.

    Args:
        tree: any.
        ahead: int64 [nodes], leaves of a node's parent that the walk takes before the node.
    """
    parent = np.maximum(tree.parent, 0)
    start, up = ahead.copy(), parent
    while up.any():
        start += start[up]
        up = up[up]
    # A first leaf is also that of the nodes above, as far up as a node comes first.
    first = np.where(ahead > 0, np.arange(len(parent)), parent)
    while (first != first[first]).any():
        first = first[first]
    return start, np.where(first > 0, tree.depth[parent[first]], 0)
