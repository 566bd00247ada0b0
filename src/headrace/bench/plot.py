"""Pictures of measurements; needs matplotlib (the extra `plot`)."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.perf.profile import DeviceProfile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.offline.planning.simulated_engine import Run


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; install it with `pip install 'headrace[plot]'`") from error
    matplotlib.use("Agg")  # draws into files; no display is asked for
    from matplotlib import pyplot

    return pyplot


def check(path: Path | None, *others: Path | None) -> None:
    """Fail before the measurement rather than after it.

    Args:
        path: of the picture; None: there will be none.
        others: files that the same command reads or writes.

    Raises:
        ConfigError: matplotlib is missing, or there can be no picture of that name: its ending is not a picture's, it
            has no folder, or it is one of the others.
    """
    if path is None:
        return
    kinds = _pyplot().figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(f"--plot: {path.name!r} is no picture; end it with .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.absolute().parent}")
    if os.path.realpath(path) in [os.path.realpath(other) for other in others if other is not None]:
        raise ConfigError(f"--plot: {path} is a file that this command reads or writes; give another name")


def gemm(profile: DeviceProfile, path: Path) -> None:
    """GEMM rate by rows."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([rows for rows, _ in profile.gemm], [rate / 1e9 for _, rate in profile.gemm], marker="o")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="rows", ylabel="GFLOP/s", title=f"{profile.device_name}, {profile.dtype}, {profile.threads} threads"
    )
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def bars(values: Mapping[str, Sequence[float]], ylabel: str, title: str, path: Path) -> None:
    """Medians with every round as a dot."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for place, (name, rounds) in enumerate(values.items()):
        axes.bar(place, sorted(rounds)[len(rounds) // 2], alpha=0.5, label=name)
        axes.plot([place] * len(rounds), list(rounds), "k.")
    axes.set_xticks(range(len(values)), list(values))
    axes.set(ylabel=ylabel, title=title)
    figure.tight_layout()
    figure.savefig(path)


def distributions(series: Mapping[str, Sequence[float]], path: Path) -> None:
    """Cumulative distributions of latencies, in milliseconds, one panel each."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, len(series), figsize=(4 * len(series), 3.5), squeeze=False)
    for axes, (name, values) in zip(panels[0], series.items()):
        ordered = sorted(value * 1000 for value in values)
        axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], drawstyle="steps-post")
        axes.set(xlabel=f"{name} (ms)", ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("share of requests or gaps")
    figure.tight_layout()
    figure.savefig(path)


def load_curves(
    ttft: Mapping[str, Mapping[float, Sequence[float]]],
    backlog: Mapping[str, Mapping[float, tuple[Sequence[float], Sequence[int]]]],
    path: Path,
) -> None:
    """Time to first token over load, mean and 90th percentile, and each run's backlog over its time.

    Args:
        ttft: by policy and load, seconds of each request.
        backlog: by policy and load, times and requests in the system then.
        path: where to.
    """
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for name, runs in ttft.items():
        loads = sorted(runs)
        means = [sum(runs[load]) / len(runs[load]) for load in loads]
        tails = [sorted(runs[load])[int(0.9 * (len(runs[load]) - 1))] for load in loads]
        (line,) = left.plot(loads, means, marker="o", label=f"{name}, mean")
        left.plot(loads, tails, marker="x", linestyle="--", color=line.get_color(), label=f"{name}, 90th percentile")
        for load, (times, waiting) in sorted(backlog[name].items()):
            ends = times[-1] or 1.0
            right.plot(
                [time / ends for time in times],
                [count + 1 for count in waiting],
                color=line.get_color(),
                alpha=min(1.0, 0.3 + 0.4 * load),
                linewidth=0.9,
                label=f"{name} at {load:g}",
            )
    left.set(xlabel="load, as a share of the sequential policy's saturation", ylabel="TTFT (s)", yscale="log")
    right.set(xlabel="share of the arrivals' time", ylabel="requests in the system + 1", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def layers(series: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Layers over time: what is to be done one behind the other in dashes, side by side in full lines."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, times in series.items():
        style = "--" if name.endswith("alone") else "-"
        axes.plot([1000 * seconds for seconds in times], range(len(times)), style, marker=".", label=name)
    axes.set(xlabel="ms since the request came", ylabel="layer", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def composition(runs: Mapping[str, "Run"], optimum_s: float, path: Path) -> None:
    """What each step of predicted runs is made of over time: compute and memory seconds per second.

    Args:
        runs: by order.
        optimum_s: the least time of the workload, drawn as a line.
        path: where to.
    """
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(len(runs), 1, figsize=(9, 2.6 * len(runs)), squeeze=False, sharex=True)
    for axes, (name, run) in zip(panels[:, 0], runs.items()):
        ends = np.cumsum(run.step_seconds)
        edges = np.linspace(0, ends[-1], 201)
        for kind, values in (("compute", run.compute), ("memory", run.memory)):
            axes.stairs(per_second(ends, run.step_seconds, values, edges), edges, label=kind)
        axes.axvline(optimum_s, color="grey", linestyle=":", label="optimum")
        axes.set(ylabel="seconds per second", title=f"{name}: {run.seconds:,.4g} s")
        axes.legend(fontsize=7, loc="upper right")
        axes.grid(alpha=0.3)
    panels[-1][0].set_xlabel("time (s)")
    figure.tight_layout()
    figure.savefig(path)


def measured(record: Mapping[str, "NDArray[np.float64]"], planned: "Run | None", path: Path) -> None:
    """What the steps of a job were made of over time, beside what was planned: seconds of each kind per second.

    Planned: compute-bound and memory-bound work. Measured: time outside of attention and in it; dotted, what the
    device's profile says of the compute-bound and memory-bound work of the same steps.

    Args:
        record: columns of `offline.jobs.step_record`.
        planned: the same job in the simulator; None: it is not drawn.
        path: where to.
    """
    panels: list[tuple[str, Any, Any, dict[str, Any]]] = []
    if planned is not None:
        kinds = {"compute": planned.compute, "memory": planned.memory}
        ends, lengths = np.cumsum(planned.step_seconds), planned.step_seconds
        panels.append((f"planned: {planned.seconds:,.4g} s", ends, lengths, kinds))
    for worker in np.unique(record["worker"]):
        mine = {name: column[record["worker"] == worker] for name, column in record.items()}
        kinds = {
            "outside of attention": mine["step_s"] - mine["attention_s"],
            "in attention": mine["attention_s"],
            "compute by the profile": mine["compute_s"],
            "memory by the profile": mine["memory_s"],
        }
        title = f"measured, engine {int(worker)}: {mine['time_s'][-1]:,.4g} s"
        panels.append((title, mine["time_s"], mine["step_s"], kinds))
    if not panels:
        return
    figure, grid = _pyplot().subplots(len(panels), 1, figsize=(9, 2.6 * len(panels)), squeeze=False, sharex=True)
    for axes, (title, ends, lengths, kinds) in zip(grid[:, 0], panels):
        edges = np.linspace(0, max(float(ends[-1]), 1e-9), 121)
        for kind, values in kinds.items():
            style = ":" if kind.endswith("profile") else "-"
            axes.stairs(per_second(ends, lengths, values, edges), edges, label=kind, linestyle=style)
        axes.set(ylabel="seconds per second", title=title)
        axes.legend(fontsize=7, loc="upper right")
        axes.grid(alpha=0.3)
    grid[-1][0].set_xlabel("time (s)")
    figure.tight_layout()
    figure.savefig(path)


def per_second(
    ends: "NDArray[np.float64]",
    lengths: "NDArray[np.float64]",
    work: "NDArray[np.float64]",
    edges: "NDArray[np.float64]",
) -> "NDArray[np.float64]":
    """Work per second between the edges; that of a step is spread over the time it took.

    Args:
        ends: float64 [steps], when each step ended, ascending.
        lengths: float64 [steps], how long each took; between steps there may be time without any.
        work: float64 [steps], seconds of one kind of work.
        edges: float64 [n + 1], ascending.
    """
    begins = np.maximum(ends - lengths, np.concatenate(([min(0.0, float(edges[0]))], ends[:-1])))
    done = np.cumsum(work)
    times = np.column_stack((begins, ends)).ravel()
    amounts = np.column_stack((done - work, done)).ravel()
    return np.diff(np.interp(edges, times, amounts)) / np.diff(edges)
