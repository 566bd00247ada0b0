"""Densities of the paper's workloads, and what the costs of requests must obey."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perf_examples import SLIDING, SMOL, profile

from headrace.core.errors import ModelError
from headrace.perf.density import CostRates, density
from headrace.perf.model_config import preset, shape_of
from headrace.perf.overlap import overlapped
from headrace.perf.presets import accelerator, as_run
from headrace.perf.roofline import optimum_seconds
from headrace.perf.step_time import StepTimeModel, linear_seconds

LLAMA = preset("llama-3-8b")
assert LLAMA is not None
# The paper counts every weight, the embedding's too, as multiplied by every token; its figures come out without the
# quadratic term of its formula (with it, Azure's long prompts give 37.8, not 33.2).
_ALL = replace(LLAMA, linear_params=8_030_000_000, head_params=1)
PAPER = replace(CostRates.of(accelerator("A100", peak=True), _ALL, rows=2048), pair=0.0)


@pytest.mark.parametrize(
    ("prompt", "output", "sharing", "expected"),
    [(496, 510, 0.0, 2.13), (2508, 23, 0.0, 33.2), (804, 2, 0.8646, 54.91)],
    ids=["WildChat", "Azure", "MMLU"],
)
def test_densities_of_the_paper(prompt: int, output: int, sharing: float, expected: float) -> None:
    found = density(PAPER.compute(prompt, output), PAPER.memory(prompt, output), sharing)
    assert found == pytest.approx(expected, rel=0.06)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 299))
def test_request_costs_are_the_sum_of_its_steps(prompt: int, output: int, saved: int) -> None:
    saved = min(saved, prompt - 1)
    for shape in (SMOL, SLIDING):
        rates = CostRates.of(profile(), shape)
        reads = sum(shape.kv_bytes_read(prompt + step) for step in range(output)) / profile().kv_read
        # The paper's d^2/2 counts half a token less per step than the contexts p .. p+d-1 do.
        assert rates.memory(prompt, output) == pytest.approx(reads, abs=(output + 1) * rates.kv)
        pairs = shape.attention_flops(saved, prompt - saved) / profile().attention
        rows = (prompt - saved + output - 1) * rates.linear + output * rates.head
        assert rates.compute(prompt, output, saved) == pytest.approx(rows + pairs, rel=1e-9)


def test_shared_prefix_costs_as_much_as_it_saves() -> None:
    rates = CostRates.of(profile(), SMOL)
    assert rates.compute(700, 10, 600) + rates.prefix(600) == pytest.approx(float(rates.compute(700, 10)))


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
def test_overlap_lies_between_the_larger_and_the_sum(a: float, b: float, c: float, d: float) -> None:
    points = accelerator("A100").overlap
    assert max(a, b) <= overlapped(a, b, points) <= (a + b) * (1 + 1e-12)
    # No order of the same work beats doing all of it at once.
    together = overlapped(a + c, b + d, points)
    assert together <= overlapped(a, b, points) + overlapped(c, d, points) + 1e-9


def test_only_devices_that_overlap_gain_by_it() -> None:
    assert optimum_seconds(3.0, 2.0, profile()) == 5.0
    gpu = accelerator("A100")
    assert optimum_seconds(3.0, 2.0, gpu) == pytest.approx(4.0)  # 3 + 2 * 0.4 / 0.8
    assert optimum_seconds(1.0, 2.0, gpu) == pytest.approx(2 + 0.2 / 0.6)
    assert optimum_seconds(3.0, 2.0, as_run(gpu, False)) == 5.0
    assert overlapped(3.0, 2.0, [(0.0, 1.0)]) == 3.0


def test_step_time_overlaps_reading_where_asked() -> None:
    shape = LLAMA
    assert shape is not None
    apart, beside = (StepTimeModel(as_run(accelerator("A100"), overlap), shape) for overlap in (False, True))
    load = apart.prefill(0, 2048) + apart.decode(20000)
    compute, memory = apart.parts(load)
    assert apart.seconds(load) == pytest.approx(apart.fixed + compute + memory)
    assert beside.seconds(load) == pytest.approx(apart.fixed + compute + memory / 2)


def test_experts_cost_by_how_many_are_hit() -> None:
    mixtral = preset("Mixtral-8x7B")
    assert mixtral is not None
    assert mixtral.linear_params == pytest.approx(12.6e9, rel=0.02)  # 12.9 with embedding and head
    assert mixtral.distinct_experts(1) == pytest.approx(2)
    assert mixtral.distinct_experts(4) == pytest.approx(8 * (1 - 0.75**4))
    assert mixtral.weight_bytes(10_000) == pytest.approx(2 * 46.4e9, rel=0.02)
    a100 = accelerator("A100", peak=True)
    # Few rows: the time is that of reading the weights hit; many: that of the active parameters' FLOPs.
    for rows in (1, 4):
        assert linear_seconds(mixtral, a100, rows) == pytest.approx(mixtral.weight_bytes(rows) / 2.039e12, rel=0.1)
    assert linear_seconds(mixtral, a100, 8192) == pytest.approx(8192 * mixtral.linear_flops / 312e12, rel=0.01)


def test_shapes_from_configurations() -> None:
    config = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    }  # fmt: skip
    assert shape_of(config) == SMOL
    assert shape_of(config | {"sliding_window": 512, "use_sliding_window": False}) == SMOL
    gemma = shape_of({"text_config": config | {"sliding_window": 512, "sliding_window_pattern": 6}}, "bfloat16")
    assert (gemma.window, gemma.window_layers, gemma.kv_itemsize) == (512, 25, 2)
    assert LLAMA.linear_params + 2 * LLAMA.head_params == pytest.approx(8.03e9, rel=0.001)
    with pytest.raises(ModelError, match="hidden_size"):
        shape_of({"num_hidden_layers": 2})


def test_density_of_what_reads_nothing() -> None:
    assert density(np.ones(3), np.zeros(3)) == np.inf
