"""The prefix tree against plain definitions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.tree import PrefixTree
from headrace.perf.roofline import shared_prefix_tokens

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=24)


def job(rows: list[list[int]]) -> JobRequests:
    return JobRequests.of(rows, [1] * len(rows))


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@given(prompts, st.integers(1, 3))
def test_nodes_are_the_runs_that_share_their_depth(rows: list[list[int]], page: int) -> None:
    tree = PrefixTree.of(job(rows), page)
    assert sorted(tree.leaves.tolist()) == list(range(len(rows)))
    ordered = [rows[i] for i in tree.leaves]
    assert ordered == sorted(rows)
    for place in range(1, len(rows)):
        expected = min(common(ordered[place - 1], ordered[place]), len(ordered[place]) - 1)
        assert tree.shared[place] == expected // page * page
    # Every node: its leaves share its depth, no leaf outside next to it does, and its parent holds it.
    for node in range(len(tree.parent)):
        first, last = int(tree.first[node]), int(tree.last[node])
        inside = tree.shared[first + 1 : last]
        if node == 0:
            assert (tree.parent[0], first, last, tree.depth[0]) == (-1, 0, len(rows), 0)
            continue
        assert last - first >= 2
        assert inside.min() == tree.depth[node] > tree.depth[tree.parent[node]]
        assert tree.shared[first] < tree.depth[node]
        assert last == len(rows) or tree.shared[last] < tree.depth[node]
        above = int(tree.parent[node])
        assert above < node
        assert tree.first[above] <= first
        assert last <= tree.last[above]
        outer = tree.shared[[i for i in (first, last) if i < len(rows)]].max(initial=0)
        assert tree.depth[above] == outer
    # Every leaf hangs below the lowest node around it.
    for place, node in enumerate(tree.above):
        around = [n for n in range(len(tree.parent)) if tree.first[n] <= place < tree.last[n]]
        assert node == max(around, key=lambda n: tree.depth[n])


@given(prompts)
def test_saved_tokens_are_those_of_perfect_sharing(rows: list[list[int]]) -> None:
    assert PrefixTree.of(job(rows)).saved_tokens == shared_prefix_tokens(rows)


def test_top_is_the_root_s_child() -> None:
    tree = PrefixTree.of(job([[1, 1, 1], [1, 1, 2], [1, 2, 1], [2, 1], [3, 1], [3, 2]]))
    top = tree.top()
    assert top[0] == top[1] == top[2] > 0
    assert top[3] == -1
    assert top[4] == top[5] > top[0]


def test_taking_requests_keeps_their_columns() -> None:
    requests = JobRequests.of([[1, 2], [3], [4, 5, 6]], [7, 8, 9], [0, 1, 2])
    taken = requests.take(np.array([2, 0]))
    assert [taken.prompt(i).tolist() for i in range(2)] == [[4, 5, 6], [1, 2]]
    assert taken.max_tokens.tolist() == [9, 7]
    assert taken.groups.tolist() == [2, 0]
