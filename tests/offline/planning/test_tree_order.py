"""Sorting and splitting: subtrees stay together, the walk goes from dense to thin, the sharing kept is as promised."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planning_examples import RATES

from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.tree import PrefixTree
from headrace.offline.planning.tree_order import order_by_density, subtree_costs

rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=24)


def costs(requests: JobRequests, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = requests.prompt_lengths
    return RATES.compute(lengths, outputs), RATES.memory(lengths, outputs)


@given(rows, st.integers(0, 10**6), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_order_holds_every_request_once_and_keeps_the_sharing(prompts: list[list[int]], seed: int, keep: float) -> None:
    requests = JobRequests.of(prompts, [1] * len(prompts))
    tree = PrefixTree.of(requests)
    compute, memory = costs(requests, np.random.default_rng(seed).integers(1, 2000, len(prompts)))
    order = order_by_density(tree, compute, memory, RATES, keep)
    assert sorted(order.requests.tolist()) == list(range(len(prompts)))
    # What the order claims to share it does share with the request before it (a prompt that is the beginning of
    # another one must compute its own last token when it comes second).
    walk = [prompts[request] for request in order.requests]
    for before, prompt, shared in zip(walk, walk[1:], order.shared[1:]):
        surely = max(0, shared - 1)
        assert prompt[:surely] == before[:surely]
    assert order.shared.sum() == order.saved_tokens >= keep * tree.saved_tokens
    if keep == 1.0:
        assert len(order.split) == 0
    assert len(set(order.split.tolist())) == len(order.split)


@given(rows, st.integers(0, 10**6))
def test_children_stand_by_falling_density(prompts: list[list[int]], seed: int) -> None:
    requests = JobRequests.of(prompts, [1] * len(prompts))
    tree = PrefixTree.of(requests)
    compute, memory = costs(requests, np.random.default_rng(seed).integers(1, 2000, len(prompts)))
    order = order_by_density(tree, compute, memory, RATES, keep=1.0)
    place = np.empty(len(prompts), np.int64)
    place[order.requests] = np.arange(len(prompts))
    node_compute, node_memory = subtree_costs(tree, compute[tree.leaves], memory[tree.leaves], RATES)
    for node in range(len(tree.parent)):
        children = []
        for child in np.flatnonzero(tree.parent == node):
            places = place[tree.leaves[tree.first[child] : tree.last[child]]]
            assert places.max() - places.min() == len(places) - 1  # together
            children.append((places.min(), node_compute[child] / node_memory[child]))
        for leaf in np.flatnonzero(tree.above == node):
            request = tree.leaves[leaf]
            own = max(0.0, compute[request] - float(RATES.prefix(tree.depth[node])))
            children.append((place[request], own / memory[request]))
        found = [density for _, density in sorted(children)]
        assert all(a >= b * (1 - 1e-9) - 1e-12 for a, b in pairwise(found))


def test_an_outlier_is_split_off_where_it_pays() -> None:
    document = list(range(100))
    prompts = [[*document, 1000 + i] for i in range(200)]
    requests = JobRequests.of(prompts, [1] * 200)
    outputs = np.full(200, 2)
    outputs[17] = 3000  # one of them reads memory for long
    compute, memory = costs(requests, outputs)
    order = order_by_density(PrefixTree.of(requests), compute, memory, RATES)
    assert order.split.tolist() == [17]
    assert order.requests[-1] == 17
    assert order.saved_tokens == 100 * 198


def test_what_is_shared_deep_in_a_tree_adds_up() -> None:
    """Prompts that part one token after another: the first leaf of a node may be that of many nodes above it."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 2, 14).tolist() for _ in range(120)]
    requests = JobRequests.of(prompts, [1] * len(prompts))
    tree = PrefixTree.of(requests)
    compute, memory = costs(requests, rng.integers(1, 2000, len(prompts)))
    order = order_by_density(tree, compute, memory, RATES, keep=1.0)
    walk = [prompts[request] for request in order.requests]
    for before, prompt, shared in zip(walk, walk[1:], order.shared[1:]):
        surely = max(0, shared - 1)
        assert prompt[:surely] == before[:surely]
    assert order.shared.sum() == tree.saved_tokens
