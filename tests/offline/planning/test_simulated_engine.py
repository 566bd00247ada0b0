"""The simulated engine: its steps cost what the step-time model says, its cache holds what it can."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_examples import CPU, GPU, MODEL, random_job

from headrace.offline.planning.fixed import FixedAdmission
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.simulated_engine import Run, SimulatedEngine
from headrace.offline.planning.tree import PrefixTree
from headrace.perf.presets import as_run
from headrace.perf.step_time import StepTimeModel


class Watched(FixedAdmission):
    """The same order, but it asks to be told of every step."""

    @property
    def follows_progress(self) -> bool:
        return True


def simulate(
    requests: JobRequests, lengths: np.ndarray, kind: type[FixedAdmission] = FixedAdmission, **how: int
) -> Run:
    options = {"max_seqs": 8, "step_tokens": 64} | how
    kv = options.pop("kv", 1000)
    engine = SimulatedEngine(requests, lengths, PrefixTree.of(requests, 16), CPU, MODEL, kv, **options)
    return engine.run(kind(np.arange(len(requests)), 16))


def test_one_request_takes_the_time_of_its_steps() -> None:
    run = simulate(JobRequests.of([list(range(100))], [3]), np.array([3]))
    model = StepTimeModel(CPU, MODEL)
    steps = [model.prefill(0, 64), model.prefill(64, 36, sampled=1), model.decode(101), model.decode(102)]
    assert run.step_seconds == pytest.approx([model.seconds(step) for step in steps])
    assert run.computed_tokens == 102


def test_shared_prefixes_are_computed_once_while_there_is_room() -> None:
    document = list(range(160))
    requests = JobRequests.of([[*document, 1000 + i] for i in range(10)], [2] * 10)
    run = simulate(requests, np.full(10, 2))
    assert run.hit_tokens == 9 * 160
    assert run.computed_tokens == 160 + 10 + 10


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([300, 1000]), st.booleans())
def test_jumping_over_steps_changes_nothing(seed: int, count: int, kv: int, reserve: bool) -> None:
    requests, lengths = random_job(seed, count)
    fast = simulate(requests, lengths, kv=kv, reserve=reserve)
    slow = simulate(requests, lengths, Watched, kv=kv, reserve=reserve)
    if not reserve:  # a prompt that waits for room to its end is looked at every few steps only
        assert fast.seconds == pytest.approx(slow.seconds)
        assert (fast.steps, fast.hit_tokens, fast.preemptions) == (slow.steps, slow.hit_tokens, slow.preemptions)
    assert (fast.resident <= kv).all()
    # Every output token but the last of each is fed once, and every prompt token not found is computed, once or more.
    needed = int(requests.prompt_lengths.sum() - fast.hit_tokens + lengths.sum() - count)
    assert fast.computed_tokens >= needed
    if not fast.preemptions:
        assert fast.computed_tokens == needed


def test_a_request_larger_than_the_pool_is_told() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        simulate(JobRequests.of([[1] * 400], [4]), np.array([4]), kv=300)


def test_overlap_shortens_steps_where_the_device_overlaps() -> None:
    requests, lengths = random_job(5, 40)
    tree = PrefixTree.of(requests, 16)
    seconds = []
    for overlap in (True, False):
        engine = SimulatedEngine(requests, lengths, tree, as_run(GPU, overlap), MODEL, 1000)
        run = engine.run(FixedAdmission(np.arange(40), 40))
        seconds.append(run.seconds)
        if not overlap:
            assert run.seconds == pytest.approx(run.compute.sum() + run.memory.sum())
    assert seconds[0] < seconds[1]
    model = dataclasses.replace(MODEL, window=8, window_layers=MODEL.layers)
    slid = SimulatedEngine(requests, lengths, tree, GPU, model, 1000).run(FixedAdmission(np.arange(40), 40))
    assert slid.memory.sum() < run.memory.sum()
