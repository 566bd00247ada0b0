import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perf_examples import SLIDING, SMOL, profile

from headrace.perf.step_time import Correction, StepLoad, StepTimeModel


def test_shape_of_the_default_model() -> None:
    assert SMOL.kv_bytes_per_token == 46080
    assert SMOL.linear_flops == 212_336_640
    assert SMOL.head_flops == 56_623_104
    assert SMOL.kv_bytes_read(1000) == 46_080_000
    # The first four tokens see 1+2+3+4 keys; QK^T and PV are 2 FLOPs per key and query channel each.
    assert SMOL.attention_flops(0, 4) == 4 * 576 * 10 * 30


def test_sliding_windows_bound_what_is_read_and_computed() -> None:
    per_layer = 2 * 4 * 4
    assert SLIDING.kv_bytes_read(25) == per_layer * (25 + 3 * 10)
    # Tokens 8..12: full layers see 9+10+11+12+13 = 55 keys, sliding ones 9+10+10+10+10 = 49.
    assert SLIDING.attention_flops(8, 5) == 4 * 8 * (55 + 3 * 49)


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 60))
def test_attention_flops_add_up_over_chunks(start: int, first: int, second: int) -> None:
    whole = SLIDING.attention_flops(start, first + second)
    assert whole == SLIDING.attention_flops(start, first) + SLIDING.attention_flops(start + first, second)


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("window_layers", 5), ("window", 0)])
def test_impossible_shapes_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match="window" if "window" in field else field):
        dataclasses.replace(SLIDING, **{field: value})


def test_a_step_is_the_sum_of_its_parts() -> None:
    model = StepTimeModel(profile(), SMOL)
    load = StepLoad(rows=64, sampled=1, kv_bytes=10**9, attention_flops=4 * 10**9)
    expected = (
        0.004
        + 30 * 0.0005
        + 64 * 212_336_640 / 80e9
        + 56_623_104 / 10e9
        + 64 * SMOL.activation_bytes / 8e9
        + 1e9 / 10e9
        + 4e9 / 40e9
    )
    assert model.seconds(load) == pytest.approx(expected)
    assert model.seconds(StepLoad()) == 0


loads = st.builds(
    StepLoad,
    rows=st.integers(1, 1000),
    sampled=st.integers(0, 64),
    kv_bytes=st.integers(0, 10**10),
    attention_flops=st.integers(0, 10**12),
)
MODEL = StepTimeModel(profile(), SMOL)


@given(loads, loads)
def test_more_work_never_takes_less_time(load: StepLoad, more: StepLoad) -> None:
    assert MODEL.seconds(load + more) >= MODEL.seconds(load)


@given(st.floats(0.01, 2.0), st.integers(0, 64), st.integers(0, 4000), st.integers(0, 600))
def test_the_inverse_is_the_largest_chunk_within_the_target(
    target: float, decoding: int, start: int, most: int
) -> None:
    beside = StepLoad()
    for _ in range(decoding):
        beside += MODEL.decode(500)
    fits = MODEL.prefill_that_fits(target, beside, start, most)
    assert 0 <= fits <= most
    if fits:
        assert MODEL.seconds(beside + MODEL.prefill(start, fits, 1)) <= target
    if fits < most:
        assert MODEL.seconds(beside + MODEL.prefill(start, fits + 1, 1)) > target


def test_deeper_prompts_and_busier_steps_leave_less_room() -> None:
    quiet, busy = StepLoad(), StepLoad(rows=32, sampled=32, kv_bytes=10**8)
    assert MODEL.prefill_that_fits(0.3, busy, 0, 512) < MODEL.prefill_that_fits(0.3, quiet, 0, 512)
    assert MODEL.prefill_that_fits(0.3, quiet, 8000, 512) < MODEL.prefill_that_fits(0.3, quiet, 0, 512)


def test_the_correction_follows_the_machine_and_is_not_thrown_by_one_stall() -> None:
    correction = Correction()
    for _ in range(60):
        correction.observe(0.1, 0.15)
    assert correction.factor == pytest.approx(1.5, rel=0.01)
    correction.observe(0.1, 30.0)
    assert correction.factor < 1.8
    correction.observe(0.0, 1.0)  # no prediction: nothing to learn
    assert correction.factor < 1.8
