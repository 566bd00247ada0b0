from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.meeting_point import BAND, WORTH, meeting_point, split, takes

seconds = st.floats(0.001, 10.0)
costs = st.lists(seconds, min_size=1, max_size=60)


@given(costs, seconds)
def test_both_end_within_a_chunk_of_each_other(compute: list[float], load: float) -> None:
    meet = meeting_point(compute, load)
    assert 0 <= meet <= len(compute)
    if meet:  # the model is not behind storage by more than the chunk that storage would have had to load
        assert sum(compute[:meet]) <= (len(compute) - meet + 1) * load + 1e-9
    if meet < len(compute):  # one chunk more, and storage would wait for the model
        assert sum(compute[: meet + 1]) > (len(compute) - meet - 1) * load


@given(costs, seconds)
def test_a_split_takes_less_than_either_alone(compute: list[float], load: float) -> None:
    found = split(compute, load)
    meet = meeting_point(compute, load)
    if found is None:
        assert meet < max(1, WORTH * len(compute))
        return
    assert 0 <= found.first <= meet <= found.sure <= len(compute)
    assert found.sure - found.first <= 2 * max(1, round(BAND * len(compute)))
    both = max(sum(compute[:meet]), (len(compute) - meet) * load)
    assert both < len(compute) * load
    assert both <= sum(compute) + load  # storage ends within a chunk of the model


def test_off_when_loading_is_clearly_faster() -> None:
    assert split([1.0] * 20, 0.1) is None
    assert split([1.0] * 20, 1.0) is not None
    assert split([], 1.0) is None


def test_a_chunk_changes_hands_when_the_model_has_it_sooner() -> None:
    assert takes(compute=0.1, outstanding=0.2)
    assert not takes(compute=0.2, outstanding=0.1)
