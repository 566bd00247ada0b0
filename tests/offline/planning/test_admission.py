"""Every order: each request once, nobody waits for nothing, memory is kept; degenerate jobs run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_examples import CPU, GPU, MODEL, random_job

from headrace.core.errors import ConfigError
from headrace.offline.planning.admission import ORDERS, make_admission
from headrace.offline.planning.fixed import balanced, fixed_order
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.simulated_engine import Run, SimulatedEngine
from headrace.offline.planning.tree import PrefixTree
from headrace.perf.model_config import preset
from headrace.perf.presets import accelerator
from headrace.perf.profile import DeviceProfile

KV = 1000


def run(
    order: str, requests: JobRequests, lengths: np.ndarray, device: DeviceProfile, known: bool, kv: int = KV
) -> Run:
    admission = make_admission(
        order, requests, device, MODEL, kv, 1, lengths if known else None, max_seqs=8, step_tokens=64
    )
    tree = PrefixTree.of(requests, 16)
    engine = SimulatedEngine(requests, lengths, tree, device, MODEL, kv, max_seqs=8, step_tokens=64)
    result = engine.run(admission)
    assert admission.remaining == 0
    assert admission.admit() == []
    assert sorted(result.order) == list(range(len(requests)))
    assert (result.resident <= kv).all()
    return result


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from(ORDERS), st.sampled_from([CPU, GPU]), st.booleans())
def test_every_request_runs_once_in_every_order(
    seed: int, count: int, order: str, device: DeviceProfile, known: bool
) -> None:
    run(order, *random_job(seed, count), device, known)


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(4))
def test_what_blend_admits_has_room_to_its_end(seed: int, device: DeviceProfile) -> None:
    requests, lengths = random_job(seed)
    tight = 400  # tokens: fewer than eight running requests would hold
    assert run("fcfs", requests, lengths, device, known=True, kv=tight).preemptions > 0
    assert run("blend", requests, lengths, device, known=True, kv=tight).preemptions == 0


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from(ORDERS), st.sampled_from([CPU, GPU]))
def test_ends_alone_keep_a_job_going(seed: int, count: int, order: str, device: DeviceProfile) -> None:
    """A runner that reports no progress, whose requests end in any order with any length."""
    requests, lengths = random_job(seed, count)
    admission = make_admission(order, requests, device, MODEL, KV, 1, max_seqs=8, step_tokens=64)
    rng = np.random.default_rng(seed)
    under_way: list[int] = []
    seen: list[int] = []
    while admission.remaining or under_way:
        taken = admission.admit()
        seen += taken
        under_way += taken
        assert under_way  # never empty while something is left to run
        ended = under_way.pop(int(rng.integers(len(under_way))))
        admission.finish(ended, int(rng.integers(0, lengths[ended] + 1)))  # a failed one may have produced nothing
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_degenerate_jobs(order: str, device: DeviceProfile) -> None:
    same = JobRequests.of([[1, 2, 3]] * 30, [4] * 30)  # equal densities, all shared
    run(order, same, np.full(30, 4), device, known=True)
    short = JobRequests.of([[i] * 40 for i in range(30)], [1] * 30)  # nothing is ever decoded
    run(order, short, np.ones(30, np.int64), device, known=False)
    rest = [[i] for i in range(10)]
    whole = JobRequests.of([[7] * 500, *rest], [480, *[8] * 10])  # one that takes all the memory there is
    run(order, whole, np.array([480, *[8] * 10]), device, known=True)
    run(order, whole, np.array([480, *[8] * 10]), device, known=False)
    one = JobRequests.of([[1]], [1])
    run(order, one, np.ones(1, np.int64), device, known=False)


def test_an_empty_job_and_an_unknown_order() -> None:
    empty = JobRequests.of([], [])
    for order in ORDERS:
        admission = make_admission(order, empty, CPU, MODEL, KV)
        assert (admission.admit(), admission.remaining) == ([], 0)
    with pytest.raises(ConfigError, match="depth"):
        make_admission("depth", empty, CPU, MODEL, KV)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=40))
def test_balanced_order_keeps_near_the_density_of_the_whole(costs: list[tuple[float, float]]) -> None:
    compute, memory = (np.array([c[i] for c in costs]) for i in range(2))
    order = balanced(compute, memory)
    assert sorted(order.tolist()) == list(range(len(costs)))
    rho = compute.sum() / memory.sum()
    # At any time what is too much of one kind is less than the one request that made it so.
    surplus = np.cumsum((compute - rho * memory)[order])
    assert abs(surplus).max() <= abs(compute - rho * memory).max() * (1 + 1e-9) + 1e-9


def test_depth_first_is_the_order_of_the_tokens() -> None:
    requests = JobRequests.of([[2, 1], [1, 2], [1], [2]], [1] * 4)
    from planning_examples import RATES

    assert fixed_order("dfs", requests, 0, RATES).tolist() == [2, 1, 3, 0]
    assert fixed_order("fcfs", requests, 0, RATES).tolist() == [0, 1, 2, 3]
    first, again = (fixed_order("random", requests, 3, RATES).tolist() for _ in range(2))
    assert first == again
    assert sorted(first) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_blend_keeps_the_sharing_that_random_loses(seed: int) -> None:
    requests, lengths = random_job(seed, 300, documents=12)
    possible = PrefixTree.of(requests, 16).saved_tokens
    blend, random = (run(order, requests, lengths, CPU, known=False) for order in ("blend", "random"))
    assert blend.hit_tokens >= 0.85 * possible
    assert random.hit_tokens <= 0.8 * possible
    assert blend.seconds < random.seconds


@pytest.mark.parametrize("known", [True, False])
def test_a_job_of_one_kind_is_not_slowed_down(known: bool) -> None:
    """Where every request is as dense as every other there is nothing to keep compute work for."""
    rng = np.random.default_rng(0)
    documents = rng.integers(0, 30_000, (40, 500))
    prompts = [[*documents[n // 16].tolist(), *rng.integers(0, 30_000, 300).tolist()] for n in rng.permutation(640)]
    requests, lengths = JobRequests.of(prompts, [8] * 640), np.full(640, 4, np.int64)
    device, model, kv = accelerator("A100"), preset("llama-3-8b", "bfloat16"), 400_000
    assert model is not None
    seconds = {}
    for order in ("dfs", "blend"):
        admission = make_admission(
            order, requests, device, model, kv, 1, lengths if known else None, max_seqs=512, step_tokens=2048
        )
        tree = PrefixTree.of(requests, 16)
        engine = SimulatedEngine(requests, lengths, tree, device, model, kv, max_seqs=512, step_tokens=2048)
        seconds[order] = engine.run(admission).seconds
    assert seconds["blend"] < 1.05 * seconds["dfs"]


def test_the_oracle_is_the_blended_order_with_true_lengths() -> None:
    requests, lengths = random_job(3)
    oracle, blend = (run(order, requests, lengths, GPU, known=True) for order in ("oracle", "blend"))
    assert oracle.order == blend.order
    assert oracle.order != run("blend", requests, lengths, GPU, known=False).order
    with pytest.raises(ConfigError, match="oracle needs"):
        make_admission("oracle", requests, GPU, MODEL, KV)
