"""BlendServe's traces simulated step by step: each order of the requests against the optimum of the workload.

An A100 with its data-sheet rates runs Llama-3-8B, counted as the paper counts (every weight multiplies every token).
GEMM and decode attention overlap as NanoFlow measured it; a step's linears take at least the time of reading the
weights. The baselines (`dfs`, `random`, ...) begin a prompt only when all that run will find room to their ends, by
true lengths that a real one would not know. `oracle` knows the lengths, `blend` estimates them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.bench.blend_traces import QUESTIONS, VIDEO_SPREAD, Trace, make_trace
from headrace.core.errors import ConfigError
from headrace.offline.planning.admission import ORACLE, check_order, make_admission
from headrace.offline.planning.blend import PAGE, BlendAdmission
from headrace.offline.planning.simulated_engine import Run, SimulatedEngine
from headrace.offline.planning.tree import PrefixTree
from headrace.perf.density import CostRates, density
from headrace.perf.model_config import preset
from headrace.perf.model_shape import ModelShape
from headrace.perf.presets import accelerator
from headrace.perf.profile import DeviceProfile
from headrace.perf.roofline import optimum_seconds

DEFAULT_ORDERS = ("dfs", "random", ORACLE, "blend")
#: KV of 60 GB, as in the paper's example, at Llama-3-8B's 128 KiB a token.
KV_TOKENS = 60_000_000_000 // 131_072
SEQUENCES, STEP_TOKENS = 1024, 2048
_WINDOW = 50  # steps


@dataclass(frozen=True)
class Setting:
    """What traces are made of and run on.

    Attributes:
        count: requests of a trace.
        seed: of traces and samples.
        spread: of the lengths of OpenVid's outputs.
        questions: of MMLU that follow the same examples.
        overlap: points as in `DeviceProfile.overlap`; None: NanoFlow's.
        step_overhead: seconds added to every step.
    """

    count: int = 40_000
    seed: int = 0
    spread: float = VIDEO_SPREAD
    questions: int = QUESTIONS
    overlap: tuple[tuple[float, float], ...] | None = None
    step_overhead: float = 0.0

    def device(self) -> DeviceProfile:
        """The A100 of this setting."""
        profile = replace(accelerator("A100", peak=True), step_overhead=self.step_overhead)
        return profile if self.overlap is None else replace(profile, overlap=self.overlap)


@dataclass(frozen=True)
class Point:
    """One trace under several orders.

    Attributes:
        density, sharing: of the trace, as the paper defines them.
        optimum_s: its least time.
        results: by order.
    """

    density: float
    sharing: float
    optimum_s: float
    results: dict[str, dict[str, float]]


def paper_model() -> ModelShape:
    """Llama-3-8B with its 8.03e9 parameters all multiplied by every token."""
    shape = preset("llama-3-8b")
    assert shape is not None
    return replace(shape, linear_params=8_030_000_000, head_params=1)


def simulate(
    point: tuple[float, float],
    setting: Setting,
    orders: Sequence[str] = DEFAULT_ORDERS,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[Point, dict[str, Run]]:
    """Run a trace of this (density, sharing) in each order.

    Raises:
        ConfigError: there is no such order, or no such trace.
    """
    for name in orders:
        check_order(name, oracle=True)
    profile, model = setting.device(), paper_model()
    rates = CostRates.of(profile, model, STEP_TOKENS)
    try:
        trace = make_trace(
            *point, setting.count, rates, setting.seed, spread=setting.spread, questions=setting.questions
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    requests = trace.requests
    tree, saved = PrefixTree.of(requests, PAGE), requests.by_tokens.saved
    prompts = requests.prompt_lengths
    memory = rates.memory(prompts, trace.lengths)
    sharing = float(saved.sum() / prompts.sum())
    optimum = optimum_seconds(float(rates.compute(prompts, trace.lengths, saved).sum()), float(memory.sum()), profile)
    runs, results = {}, {}
    for name in orders:
        runs[name], results[name] = _run(name, trace, tree, profile, model, setting.seed, optimum)
        advance(1)
    found = density(rates.compute(prompts, trace.lengths), memory, sharing)
    return Point(found, sharing, optimum, results), runs


def _run(
    name: str, trace: Trace, tree: PrefixTree, profile: DeviceProfile, model: ModelShape, seed: int, optimum: float
) -> tuple[Run, dict[str, float]]:
    requests, lengths = trace.requests, trace.lengths
    ours = name in (ORACLE, "blend")
    known = None if name == "blend" else lengths
    admission = make_admission(
        name, requests, profile, model, KV_TOKENS, seed, known, max_seqs=SEQUENCES, step_tokens=STEP_TOKENS
    )
    engine = SimulatedEngine(
        requests, lengths, tree, profile, model, KV_TOKENS,
        max_seqs=SEQUENCES, step_tokens=STEP_TOKENS, reserve=not ours,
    )  # fmt: skip
    run = engine.run(admission)
    result = {
        "seconds": run.seconds,
        "share_of_optimum": optimum / run.seconds,
        "sharing_kept": run.hit_tokens / tree.saved_tokens,
        "tokens_per_s": float(requests.prompt_lengths.sum() + lengths.sum()) / run.seconds,
        "compute_share_deviation": window_deviation(run),
        "preemptions": run.preemptions,
        "steps": run.steps,
    }
    if isinstance(admission, BlendAdmission):
        result["leaves_split"] = admission.split / len(requests)
        result["sampled"] = admission.sampled / len(requests)
        result["warm_up_share"] = _warm_up(run, admission) / run.seconds
    return run, result


def window_deviation(run: Run, window: int = _WINDOW) -> float:
    """Standard deviation of compute's share of the work, over windows of so many steps."""
    count = run.steps // window * window
    if not count:
        return 0.0
    compute, memory = (values[:count].reshape(-1, window).sum(axis=1) for values in (run.compute, run.memory))
    return float((compute / (compute + memory)).std())


def _warm_up(run: Run, admission: BlendAdmission) -> float:
    """Seconds until the first request that is not of the sample was handed over."""
    return run.handed_s[min(admission.sampled, len(run.handed_s) - 1)] if admission.sampled else 0.0


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """Means over the traces, with what the paper measured beside what says whether the simulator agrees with it."""

    def mean(order: str, key: str) -> float | None:
        values = [point.results[order][key] for point in points if order in point.results]
        return round(float(np.mean(values)), 4) if values else None

    told: dict[str, Any] = {
        "dfs_share_of_optimum": mean("dfs", "share_of_optimum"),
        "paper_dfs_share_of_optimum": 0.717,
        "random_sharing_kept": mean("random", "sharing_kept"),
        "paper_random_sharing_kept": "< 0.3",
    }
    for order in (ORACLE, "blend"):
        both = [p.results for p in points if order in p.results and "dfs" in p.results]
        told[f"{order}_share_of_optimum"] = mean(order, "share_of_optimum")
        told[f"{order}_sharing_kept"] = mean(order, "sharing_kept")
        if both:
            gains = [r["dfs"]["seconds"] / r[order]["seconds"] - 1 for r in both]
            told[f"{order}_gain_over_dfs"] = round(float(np.mean(gains)), 4)
            deviations = [r[order]["compute_share_deviation"] / r["dfs"]["compute_share_deviation"] for r in both]
            told[f"{order}_deviation_of_dfs"] = round(float(np.mean(deviations)), 4)
    told["paper_blend_gain_over_dfs"] = 0.2084
    told["paper_blend_share_of_optimum"] = 0.8655
    losses = [
        p.results["blend"]["seconds"] / p.results[ORACLE]["seconds"] - 1
        for p in points
        if "blend" in p.results and ORACLE in p.results
    ]
    if losses:
        told["loss_by_estimates"] = round(float(np.mean(losses)), 4)
        told["leaves_split"] = mean(ORACLE, "leaves_split")
        told["sampled"] = mean("blend", "sampled")
        told["warm_up_share"] = mean("blend", "warm_up_share")
    return told
