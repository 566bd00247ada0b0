"""Pictures of measurements; needs matplotlib (the extra `plot`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.perf.profile import DeviceProfile


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; install it with `pip install 'headrace[plot]'`") from error
    matplotlib.use("Agg")  # draws into files; no display is asked for
    from matplotlib import pyplot

    return pyplot


def check(path: Path | None) -> None:
    """Fail before the measurement rather than after it.

    Raises:
        ConfigError: matplotlib is missing, or the file's ending is not a picture's.
    """
    if path is None:
        return
    kinds = _pyplot().figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(f"--plot: {path.name!r} is no picture; end it with .png, .svg or .pdf")


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
