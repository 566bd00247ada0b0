"""Sorting prompts block by block against Python's own sorting."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.offline.planning import sorting
from headrace.offline.planning.requests import JobRequests

#: Prompts of a few runs of equal tokens: many share a long beginning, end at a block's edge, or are equal.
runs = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 3, 63, 64, 65])), min_size=1, max_size=4)
prompts = st.lists(runs.map(lambda found: [token for token, times in found for _ in range(times)]), max_size=16)


def check(rows: list[list[int]]) -> None:
    found = JobRequests.of(rows, [1] * len(rows)).by_tokens
    assert found.leaves.tolist() == sorted(range(len(rows)), key=rows.__getitem__)
    ordered = [rows[leaf] for leaf in found.leaves]
    shared = [0][: len(rows)]
    for before, prompt in pairwise(ordered):
        same = [a == b for a, b in zip(before, prompt)]
        shared.append(min([*same, False].index(False), len(prompt) - 1))
    assert found.common.tolist() == shared


@given(prompts)
def test_order_and_common_tokens(rows: list[list[int]]) -> None:
    check(rows)


def test_many_prompts_are_looked_at_a_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_TOGETHER", 64)
    stream = np.random.default_rng(0)
    heads = [stream.integers(0, 3, 30).tolist() for _ in range(5)]
    check([[*heads[number % 5], *stream.integers(0, 2**31 - 1, stream.integers(0, 9))] for number in range(300)])


def test_the_largest_token_is_no_end_of_a_prompt() -> None:
    check([[2**31 - 1], [2**31 - 1, 0], [0], [0, 2**31 - 1]])


def test_a_job_is_sorted_once() -> None:
    requests = JobRequests.of([[2], [1]], [1, 1])
    assert requests.by_tokens is requests.by_tokens
