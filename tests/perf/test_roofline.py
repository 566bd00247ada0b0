import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perf_examples import SLIDING, SMOL, profile

from headrace.perf.roofline import roofline_seconds, shared_prefix_tokens, work_of


def test_sharing_is_counted_by_hand() -> None:
    assert shared_prefix_tokens([[1, 2, 3]]) == 0
    assert shared_prefix_tokens([[1, 2, 3], [1, 2, 4], [9]]) == 2
    assert shared_prefix_tokens([[1, 2], [1, 2, 3], [1, 2, 3, 4]]) == 2 + 3
    # Equal prompts still compute their last token.
    assert shared_prefix_tokens([[5, 6, 7], [5, 6, 7], [5, 6, 7]]) == 2 + 2
    # Token ids above 255 and above 65535 sort and compare as numbers, not as bytes cut short.
    assert shared_prefix_tokens([[256, 70000], [256, 70001], [1, 70000]]) == 1


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_sharing_equals_a_prefix_tree(prompts: list[list[int]]) -> None:
    nodes = {tuple(p[: i + 1]) for p in prompts for i in range(len(p))}
    repeated = len(prompts) - len({tuple(p) for p in prompts})  # each repeat computes its last token again
    assert shared_prefix_tokens(prompts) == sum(map(len, prompts)) - len(nodes) - repeated


def test_work_and_seconds_by_hand() -> None:
    work = work_of([[1, 2, 3, 4], [1, 2, 9]], [3, 1], SMOL)
    assert (work.prompt_tokens, work.shared_tokens, work.output_tokens, work.fed_tokens) == (7, 2, 4, 2)
    assert work.computed_tokens == 7
    assert work.kv_bytes == 46080 * ((4 + 5 + 6) + 3)
    expected = (7 * 212_336_640 + 4 * 56_623_104) / 100e9 + 46080 * 18 / 20e9
    assert roofline_seconds(work, SMOL, profile()) == pytest.approx(expected)


def test_sliding_layers_read_their_window() -> None:
    work = work_of([[1] * 12], [2], SLIDING)
    assert work.kv_bytes == 2 * 4 * 4 * ((12 + 13) + 3 * (10 + 10))


def test_the_mixed_workload_takes_about_28_seconds_at_the_rates_it_was_first_measured_with() -> None:
    rng = random.Random(0)
    documents = [[rng.randrange(40000) for _ in range(600)] for _ in range(8)]
    prompts = [d + [rng.randrange(40000) for _ in range(30)] for d in documents for _ in range(4)]
    prompts += [[rng.randrange(40000) for _ in range(40)] for _ in range(32)]
    work = work_of(prompts, [16] * 32 + [200] * 32, SMOL)
    assert work.computed_tokens == 8 * 600 + 32 * 30 + 32 * 40 + 32 * 15 + 32 * 199
    device = profile(gemm=((8, 36e9), (32, 82e9), (512, 130e9), (1024, 139e9)), sum_read=20e9)
    assert roofline_seconds(work, SMOL, device) == pytest.approx(28, abs=1.5)


def test_empty_prompts_and_outputs_are_refused() -> None:
    for prompts, outputs in (([[]], [1]), ([[1]], [0]), ([[1]], [1, 2])):
        with pytest.raises(ValueError, match=r"token|output"):
            work_of(prompts, outputs, SMOL)
