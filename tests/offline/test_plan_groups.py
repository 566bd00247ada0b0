"""Groups of a plan: bounded in number and size, and samples that keep what their group shares."""

import numpy as np
import pytest

from headrace.offline.plan_groups import MOST_GROUPS, groups_of, predict_groups
from headrace.offline.plan_workload import Workload
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.target import Target
from headrace.perf.model_config import preset
from headrace.perf.presets import accelerator

SHAPE = preset("llama-3-8b", "bfloat16")
assert SHAPE is not None
TARGET = Target(accelerator("A100", "bfloat16"), SHAPE, kv_tokens=40_000)


def workload(groups: list[int], family: int, shared: int, own: int) -> Workload:
    """Prompts in families that share tokens, in random order; a family is of one group."""
    rng = np.random.default_rng(0)
    prompts = []
    for number in range(len(groups)):
        stem = np.random.default_rng(1000 * groups[number] + number // family).integers(1, 500, shared)
        prompts.append([*stem.tolist(), *rng.integers(1, 500, own).tolist()])
    order = rng.permutation(len(groups)).tolist()
    requests = JobRequests.of([prompts[i] for i in order], [8] * len(groups), [groups[i] for i in order])
    return Workload(requests, np.full(len(groups), 8, np.int64), TARGET)


def test_only_the_largest_groups_are_simulated() -> None:
    numbers = [group for group in range(MOST_GROUPS + 3) for _ in range(group + 1)]
    whole = workload(numbers, 1, 0, 12)
    profile = groups_of(whole)
    assert sum(sum(group.histogram) for group in profile) == len(numbers)
    seen: list[int] = []
    groups = predict_groups(whole, profile, {"dfs": whole.run("dfs")}, advance=seen.append)
    assert [group.number for group in groups] == list(range(MOST_GROUPS + 3))[::-1]
    assert [bool(group.orders) for group in groups] == [True] * MOST_GROUPS + [False] * 3
    assert seen == [1] * MOST_GROUPS


def test_a_sample_stands_for_a_large_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.offline.plan_groups._REQUESTS", 2000)
    whole = workload([0] * 4800 + [1] * 8, 8, 512, 4)
    runs = {order: whole.run(order) for order in ("dfs", "random")}
    sampled = predict_groups(whole, groups_of(whole), runs)[0]
    assert (sampled.requests, sampled.simulated) == (4800, 1000)
    assert sampled.orders["dfs"].seconds == pytest.approx(runs["dfs"].seconds, rel=0.1)
    assert runs["random"].seconds > sampled.orders["random"].seconds > 1.1 * sampled.orders["dfs"].seconds


def test_a_group_of_long_prompts_is_sampled_by_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.offline.plan_groups._TOKENS", 6000)
    whole = workload([0] * 200 + [1], 2, 50, 42)
    sampled = predict_groups(whole, groups_of(whole), {"dfs": whole.run("dfs")})[0]
    assert sampled.simulated == 24
