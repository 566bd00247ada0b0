"""The simulated traces are as asked for, and blending gains where the paper says it does."""

import numpy as np
import pytest

from headrace.bench.blend_sim import Setting, paper_model, simulate, summary
from headrace.bench.blend_traces import POINTS, make_trace
from headrace.core.errors import ConfigError
from headrace.offline.planning.admission import ORACLE
from headrace.offline.planning.tree import PrefixTree
from headrace.perf.density import CostRates, density


@pytest.mark.parametrize("point", POINTS)
def test_traces_have_the_density_and_sharing_asked_for(point: tuple[float, float]) -> None:
    rates = CostRates.of(Setting().device(), paper_model(), 2048)
    trace = make_trace(*point, 12_000, rates, seed=3)
    prompts = trace.requests.prompt_lengths
    sharing = PrefixTree.of(trace.requests).saved_tokens / prompts.sum()
    assert sharing == pytest.approx(point[1], abs=0.02)
    found = density(rates.compute(prompts, trace.lengths), rates.memory(prompts, trace.lengths), sharing)
    assert found == pytest.approx(point[0], rel=0.15)  # a dozen videos are all its memory work
    assert (trace.lengths <= trace.requests.max_tokens).all()
    assert np.bincount(trace.source).min() > 0


def test_a_small_trace_through_all_orders() -> None:
    point, runs = simulate((0.9, 0.35), Setting(count=4000), ("dfs", "random", ORACLE, "blend"))
    for order, run in runs.items():
        assert sorted(run.order) == list(range(4000))
        assert 0.2 < point.results[order]["share_of_optimum"] < 1
    assert point.results[ORACLE]["seconds"] < point.results["dfs"]["seconds"]
    assert point.results["dfs"]["sharing_kept"] == pytest.approx(1, abs=0.01)
    told = summary([point])
    assert told["random_sharing_kept"] < told["blend_sharing_kept"]
    assert told["sampled"] == pytest.approx(0.01)
    with pytest.raises(ConfigError, match="--order"):
        simulate((0.9, 0.35), Setting(count=100), ("bland",))
    with pytest.raises(ConfigError, match="take more"):
        simulate((0.9, 0.35), Setting(count=100, questions=3), ("dfs",))
