"""`headrace bench blend-sim`: orders of an offline batch, simulated at the four points of BlendServe."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.report import print_json, print_table, show
from headrace.cli.options import Json
from headrace.core.errors import ConfigError


def bench_blend_sim(
    requests: Annotated[int, typer.Option(min=100, help="of a trace")] = 40_000,
    point: Annotated[
        list[str] | None, typer.Option(metavar="DENSITY,SHARING", help="a trace; repeat; default: the paper's four")
    ] = None,
    order: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="repeat; oracle knows the lengths; default: those compared")
    ] = None,
    overlap: Annotated[
        str | None, typer.Option(metavar="SHARE,RATE", help="attention's share of the units, and its rate with it")
    ] = None,
    spread: Annotated[float, typer.Option(min=0.0, help="of video lengths: standard deviation over mean")] = 0.3,
    questions: Annotated[int, typer.Option(min=2, help="of MMLU that follow the same examples; 0.86 is shared")] = 14,
    step_overhead: Annotated[float, typer.Option(min=0.0, help="milliseconds added to every step")] = 0.0,
    seed: Annotated[int, typer.Option(help="of traces and samples")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the first trace's batches over time")] = None,
    json: Json = False,
) -> None:
    """Simulate an A100 with Llama-3-8B over mixes of BurstGPT, MMLU and OpenVid in several orders."""
    from headrace.bench import blend_sim as measuring
    from headrace.bench import plot as drawing
    from headrace.bench.blend_traces import POINTS
    from headrace.bench.progress import progress

    drawing.check(plot)
    given = [_pair("--point", text) for text in point] if point else list(POINTS)
    setting = measuring.Setting(
        count=requests,
        seed=seed,
        spread=spread,
        questions=questions,
        overlap=None if overlap is None else (_pair("--overlap", overlap),),
        step_overhead=step_overhead / 1e3,
    )
    orders = list(dict.fromkeys(order or measuring.DEFAULT_ORDERS))
    points = []
    with progress("simulating", len(given) * len(orders)) as advance:
        for one in given:
            found, runs = measuring.simulate(one, setting, orders, advance)
            points.append(found)
            if plot is not None and len(points) == 1:
                drawing.composition(runs, found.optimum_s, plot)
    result = measuring.summary(points)
    if json:
        print_json({**result, "setting": asdict(setting), "points": [asdict(found) for found in points]})
        return
    columns = ("density, sharing", "order", "seconds", "of optimum", "sharing", "deviation", "preempted")
    keys = ("seconds", "share_of_optimum", "sharing_kept", "compute_share_deviation", "preemptions")
    rows = [
        [f"{found.density:.2f}, {found.sharing:.2f}", name, *(show(values[key]) for key in keys)]
        for found in points
        for name, values in found.results.items()
    ]
    print_table("Orders", columns, rows)
    print_table("Means", ("", "value"), [(name.replace("_", " "), show(value)) for name, value in result.items()])


def _pair(flag: str, text: str) -> tuple[float, float]:
    try:
        first, second = (float(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not two numbers with a comma between") from None
    return first, second
