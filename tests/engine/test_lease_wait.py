from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.lease_wait import SLACK_SECONDS, patience


@given(st.floats(0, 1e4))
def test_waiting_in_vain_costs_at_most_as_much_again_and_a_little(compute: float) -> None:
    assert compute <= patience(compute) <= min(1.25 * compute, compute + SLACK_SECONDS) + 1e-9


def test_long_prompts_wait_as_long_as_they_take() -> None:
    assert patience(10.0) == 10.25
    assert patience(0.1) == 0.125
