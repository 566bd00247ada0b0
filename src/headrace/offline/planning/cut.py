"""Cuts a job for several workers: each gets whole subtrees, as many seconds of both kinds of work as its speed allows.

Subtrees that take much of what a worker is to do are cut into their children, each of which computes the prefix above
it anew where it lands on another worker. Large pieces go one by one to the worker that they fill least; the many small
ones are dealt out along the density order, so that every worker's mix is that of the whole job.
"""

from dataclasses import dataclass

import numpy as np

from headrace.offline.planning.tree import Floats, Ints, PrefixTree

#: A subtree that takes more than this part of a worker's share is cut into its children (own).
COARSE = 0.1
#: A piece of more than this part of a worker's share is placed by itself, smaller ones are dealt out (own).
FINE = 0.002
#: How often the small pieces go round all workers.
ROUNDS = 64


@dataclass(frozen=True)
class Costs:
    """Seconds of work by request, on one worker's device; prefixes are counted once, at their first request.

    Attributes:
        compute, memory: float64 [n].
    """

    compute: Floats
    memory: Floats

    @property
    def seconds(self) -> Floats:
        """Of both kinds, as if nothing overlapped."""
        return self.compute + self.memory


def pieces(tree: PrefixTree, seconds: Floats, most: float) -> Ints:
    """Which piece each request belongs to, numbered from 0: subtrees below the root, cut while they take too long.

    Args:
        tree: of the job.
        seconds: of each request.
        most: seconds of a piece that is no single request.
    """
    sums = np.zeros(len(tree) + 1)
    np.cumsum(seconds[tree.leaves], out=sums[1:])
    whole = sums[tree.last] - sums[tree.first]
    parents, heavy = tree.parent.tolist(), (whole > most).tolist()
    # The piece of a node: its highest ancestor that is light; 0 where it is heavy itself.
    piece = [0] * len(parents)
    for node in range(1, len(parents)):  # parents come first
        above = piece[parents[node]]
        piece[node] = above or (0 if heavy[node] else node)
    of_leaf = np.array(piece, np.int64)[tree.above]
    alone = of_leaf == 0  # leaves right below a node that was cut
    of_leaf[alone] = len(parents) + np.flatnonzero(alone)
    found = np.empty(len(tree), np.int64)
    found[tree.leaves] = np.unique(of_leaf, return_inverse=True)[1].reshape(-1)
    return found


def cut(tree: PrefixTree, costs: list[Costs]) -> Ints:
    """The worker of each request.

    Args:
        tree: of the job.
        costs: of its requests, for each worker.
    """
    first = costs[0]
    if len(costs) == 1 or not len(tree):
        return np.zeros(len(tree), np.int64)
    totals = np.array([[float(each.compute.sum()), float(each.memory.sum())] for each in costs])
    speed = 1.0 / np.maximum(totals.sum(axis=1), 1e-12)
    share = speed / speed.sum()  # of the job, for each worker
    piece = pieces(tree, first.seconds, COARSE * float(share.min()) * float(first.seconds.sum()))
    # What each piece adds, in parts of the job's compute and of its memory.
    parts = np.stack(
        [np.bincount(piece, values) / max(float(values.sum()), 1e-12) for values in (first.compute, first.memory)], 1
    )
    workers = _place(parts, share)
    return workers[piece]


def _place(parts: Floats, share: Floats) -> Ints:
    """The worker of each piece.

    Args:
        parts: float64 [pieces, 2], of the job's compute and memory.
        share: float64 [workers], of the job.
    """
    size = parts.sum(axis=1) / 2
    chosen = np.zeros(len(size), np.int64)
    filled = np.zeros((len(share), 2))
    large = np.flatnonzero(size > FINE * float(share.min()))
    for number in large[np.argsort(-size[large], kind="stable")].tolist():
        after = (filled + parts[number]) / share[:, None]
        # The worker whose fuller kind of work stays least full; of equal ones the one with less in all.
        worker = int(np.lexsort((after.sum(axis=1), after.max(axis=1)))[0])
        chosen[number] = worker
        filled[worker] += parts[number]
    small = np.flatnonzero(size <= FINE * float(share.min()))
    if len(small):
        density = parts[small, 0] / np.maximum(parts[small, 1], 1e-15)
        small = small[np.argsort(-density, kind="stable")]
        room = np.maximum(share - filled.mean(axis=1), 0.0)
        edges = np.cumsum(room) / max(float(room.sum()), 1e-15)
        middle = (np.cumsum(size[small]) - size[small] / 2) / float(size[small].sum())
        chosen[small] = np.minimum(np.searchsorted(edges, middle * ROUNDS % 1.0), len(share) - 1)
    return chosen
