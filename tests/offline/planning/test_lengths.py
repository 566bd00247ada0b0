"""Length estimates: bounded, drawn from the nearest relatives, corrected while a job runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_examples import random_job

from headrace.offline.planning.lengths import SAMPLE, LengthEstimator
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.tree import PrefixTree


def estimator(requests: JobRequests, lengths: np.ndarray | None = None) -> LengthEstimator:
    return LengthEstimator(requests, PrefixTree.of(requests, 16), lengths)


@given(st.integers(0, 10**6), st.integers(1, 80), st.data())
def test_estimates_are_bounded_whatever_is_seen(seed: int, count: int, data: st.DataObject) -> None:
    requests, lengths = random_job(seed, count)
    one = estimator(requests)
    for request in data.draw(st.lists(st.integers(0, count - 1), unique=True)):
        if data.draw(st.booleans()):
            one.observe(request, int(lengths[request]))
        else:
            one.progress(np.array([request]), np.array([data.draw(st.integers(0, int(requests.max_tokens[request])))]))
        estimate = one.estimate()
        assert (estimate >= 1).all()
        assert (estimate <= requests.max_tokens).all()


def test_relatives_near_by_count_more() -> None:
    documents = [[d] * 32 for d in range(2)]
    prompts = [[*documents[i % 2], 100 + i] for i in range(100)] + [[500 + i] for i in range(100)]
    requests = JobRequests.of(prompts, [1000] * 200)
    one = estimator(requests)
    for i in range(0, 20, 2):
        one.observe(i, 10)  # the first document's
        one.observe(i + 1, 400)  # the second's
        one.observe(100 + i, 90)  # prompts without one
    estimate = one.estimate()
    assert estimate[50] == pytest.approx(10, abs=30)
    assert estimate[51] == pytest.approx(400, abs=40)
    assert estimate[150] == pytest.approx(90, abs=40)
    assert estimate[0] == 10


def test_a_running_request_that_outlives_its_estimate_raises_it() -> None:
    requests = JobRequests.of([[i] for i in range(50)], [4000] * 50)
    one = estimator(requests)
    for i in range(20):
        one.observe(i, 100)
    before = one.estimate()
    one.progress(np.array([30]), np.array([2000]))
    after = one.estimate()
    assert after[30] > 2000
    assert after[31] > before[31]


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([1, 99, 400, 1000]))
def test_sample_is_a_hundredth_and_holds_every_large_kind(seed: int, count: int) -> None:
    requests, lengths = random_job(seed, count)
    sample = estimator(requests).sample(seed)
    assert len(set(sample.tolist())) == len(sample)
    assert 1 <= len(sample) <= max(1, int(np.ceil(count * SAMPLE)))
    if count == 1000:
        assert set(requests.groups[sample].tolist()) == {0, 1}
    assert len(estimator(requests, lengths).sample(seed)) == 0


def test_a_refused_request_says_nothing_of_its_relatives() -> None:
    requests = JobRequests.of([[i] for i in range(50)], [1000] * 50)
    one = estimator(requests)
    for i in range(5):
        one.observe(i, 400)
    before = one.estimate()
    assert not any(one.observe(i, 0) for i in range(5, 25))
    assert (one.estimate() == before).all()
