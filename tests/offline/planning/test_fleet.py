"""A job on several workers: parts of equal seconds, whole subtrees, everything once, and nobody idles at the end."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_examples import CPU, MODEL, RATES, random_job

from headrace.offline.planning.admission import ORDERS
from headrace.offline.planning.cut import Costs, cut, pieces
from headrace.offline.planning.fleet import Fleet
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.target import Target
from headrace.offline.planning.tree import PrefixTree
from headrace.perf.profile import DeviceProfile

TARGET = Target(CPU, MODEL, kv_tokens=2000, max_seqs=8, step_tokens=64)


def slower(profile: DeviceProfile, times: float) -> DeviceProfile:
    """A device that does everything so many times more slowly."""
    import dataclasses

    return dataclasses.replace(
        profile,
        gemm=tuple((rows, rate / times) for rows, rate in profile.gemm),
        kv_read=profile.kv_read / times,
        attention=profile.attention / times,
        copy=profile.copy / times,
    )


def costs_of(requests: JobRequests, tree: PrefixTree, lengths: np.ndarray, times: float = 1.0) -> Costs:
    saved = np.empty(len(requests), np.int64)
    saved[tree.leaves] = tree.shared
    prompts = requests.prompt_lengths
    return Costs(RATES.compute(prompts, lengths, saved) * times, RATES.memory(prompts, lengths) * times)


@pytest.mark.parametrize("slow", [1.0, 3.0])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_parts_take_equal_seconds_of_both_kinds(workers: int, slow: float) -> None:
    requests, lengths = random_job(5, 2000, documents=60)
    tree = PrefixTree.of(requests, 16)
    each = [costs_of(requests, tree, lengths, slow if worker == 0 else 1.0) for worker in range(workers)]
    owner = cut(tree, each)
    for kind in ("compute", "memory"):
        seconds = [float(getattr(c, kind)[owner == worker].sum()) for worker, c in enumerate(each)]
        assert max(seconds) < 1.08 * min(seconds)


def test_subtrees_stay_whole_unless_they_are_large() -> None:
    requests, lengths = random_job(7, 800, documents=50)
    tree = PrefixTree.of(requests, 16)
    owner = cut(tree, [costs_of(requests, tree, lengths)] * 2)
    top = np.empty(len(requests), np.int64)
    top[tree.leaves] = tree.top()
    assert all(len(set(owner[top == name].tolist())) == 1 for name in set(top[top >= 0].tolist()))


def test_one_subtree_for_all_is_cut() -> None:
    prompts = [[1] * 64 + [2 + i % 5] * 32 + [i] for i in range(400)]
    requests = JobRequests.of(prompts, [8] * 400)
    tree = PrefixTree.of(requests, 16)
    costs = costs_of(requests, tree, np.full(400, 8))
    assert len(set(pieces(tree, costs.seconds, float(costs.seconds.sum())).tolist())) == 1
    owner = cut(tree, [costs] * 4)
    counts = np.bincount(owner, minlength=4)
    assert counts.max() < 1.2 * counts.min()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(0, 80),
    workers=st.integers(1, 4),
    order=st.sampled_from(ORDERS),
    known=st.booleans(),
    losses=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=2),
)
def test_every_request_ends_once_whatever_happens(
    seed: int, count: int, workers: int, order: str, known: bool, losses: list[tuple[int, int]]
) -> None:
    requests, lengths = random_job(seed, count)
    fleet = Fleet(order, requests, [TARGET] * workers, seed, lengths if known else None)
    rng = np.random.default_rng(seed)
    running: list[set[int]] = [set() for _ in range(workers)]
    ended: list[int] = []
    lost: set[int] = set()
    now = 0.0
    while fleet.remaining or any(running):
        now += float(rng.random())
        for worker in range(workers):
            taken = fleet.admit(worker, now)
            assert not taken or worker not in lost
            assert all(fleet.owner(request) == worker for request in taken)
            running[worker].update(taken)
        assert any(running)
        worker = int(rng.choice([w for w in range(workers) if running[w]]))
        for after, victim in losses:
            if len(ended) >= after and victim < workers and victim not in lost and len(lost) + 1 < workers:
                assert fleet.lose(victim)
                lost.add(victim)
                running[victim].clear()
        if not running[worker]:
            continue
        request = int(rng.choice(sorted(running[worker])))
        running[worker].remove(request)
        ids = np.array(sorted(set().union(*running)), np.int64)
        fleet.progress(ids, np.minimum(lengths[ids], 3))
        fleet.finish(request, int(lengths[request]), now)
        ended.append(request)
    assert sorted(ended) == list(range(count))
    assert all(fleet.admit(worker, now) == [] for worker in range(workers))


def test_no_worker_left_is_told() -> None:
    requests, _ = random_job(1, 20)
    fleet = Fleet("blend", requests, [TARGET] * 2)
    assert fleet.lose(0)
    assert not fleet.lose(1)


def makespan(fleet: Fleet, requests: JobRequests, lengths: np.ndarray, speeds: list[float]) -> float:
    """Each worker runs up to 8 requests at once, each at an eighth of its speed."""
    tree = PrefixTree.of(requests, 16)
    seconds = costs_of(requests, tree, lengths).seconds
    queue: list[tuple[float, int, int]] = []
    waiting: list[list[int]] = [[] for _ in speeds]
    busy = [0] * len(speeds)
    now = 0.0
    while True:
        for worker, speed in enumerate(speeds):
            waiting[worker] += fleet.admit(worker, now)
            while waiting[worker] and busy[worker] < 8:
                request = waiting[worker].pop(0)
                heapq.heappush(queue, (now + 8 * float(seconds[request]) / speed, request, worker))
                busy[worker] += 1
        if not queue:
            return now
        now, request, worker = heapq.heappop(queue)
        busy[worker] -= 1
        fleet.finish(request, int(lengths[request]), now)


@pytest.mark.parametrize("order", ["blend", "dfs"])
@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 0.5], [0.3, 1.0, 1.0]])
def test_an_unforeseen_slow_worker_is_helped(order: str, speeds: list[float]) -> None:
    requests, lengths = random_job(11, 1500, documents=40)
    fleet = Fleet(order, requests, [TARGET] * len(speeds), lengths=lengths)
    seconds = costs_of(requests, PrefixTree.of(requests, 16), lengths).seconds
    assert makespan(fleet, requests, lengths, speeds) < 1.1 * float(seconds.sum()) / sum(speeds)


def test_what_is_known_of_the_devices_is_used() -> None:
    requests, lengths = random_job(13, 1500, documents=40)
    slow = Target(slower(CPU, 4.0), MODEL, kv_tokens=2000, max_seqs=8, step_tokens=64)
    fleet = Fleet("dfs", requests, [slow, TARGET], lengths=lengths)
    share = np.mean([fleet.owner(request) == 0 for request in range(1500)])
    assert 0.15 < share < 0.25
