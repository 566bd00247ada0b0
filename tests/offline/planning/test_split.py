"""The division of memory, and what running sequences will need."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.offline.planning.split import memory_split, peak_tokens

densities = st.floats(0, 1000)


@given(densities, densities, densities)
def test_shares_fill_memory_and_reach_the_density_where_the_ends_can(left: float, right: float, whole: float) -> None:
    a, b = memory_split(60.0, left, right, whole)
    assert a + b == pytest.approx(60)
    assert a >= 0
    assert b >= 0
    if left > right * (1 + 1e-6) + 1e-6 and right <= whole <= left:
        assert left * a + right * b == pytest.approx(whole * 60, rel=1e-6, abs=1e-6)


def test_example_of_the_paper() -> None:
    assert memory_split(60.0, 3.73, 0.096, 1.27) == pytest.approx((19.3, 40.7), abs=0.1)


def test_degenerate_densities() -> None:
    inf = float("inf")
    assert memory_split(10, 2, 2, 2) == (5, 5)
    assert memory_split(10, 2, 1, 3) == (10, 0)
    assert memory_split(10, 2, 1, 0.5) == (0, 10)
    assert memory_split(10, inf, 1, 2) == (0, 10)
    assert memory_split(10, inf, inf, inf) == (5, 5)
    assert memory_split(10, 1, 2, 1.5) == (5, 5)  # the wrong way round: estimates have changed under the order


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=8), st.integers(0, 25))
def test_peak_is_the_most_of_all_steps(sequences: list[tuple[int, int]], steps: int) -> None:
    held, ahead = (np.array([s[i] for s in sequences], np.float64) for i in range(2))
    most = max(
        (sum(h + step for h, a in sequences if a >= step) for step in range(min(20, steps) + 1)),
        default=0,
    )
    assert peak_tokens(held, ahead, steps) == most
