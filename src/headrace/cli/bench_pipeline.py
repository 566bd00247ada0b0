"""`headrace bench pipeline`: a prefix loads while its suffix is computed."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.report import report
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig


@with_settings(EngineConfig)
def bench_pipeline(
    config: EngineConfig,
    prefix_chunks: Annotated[int, typer.Option(min=1, help="chunks of the stored prefix")] = 16,
    suffix_tokens: Annotated[int, typer.Option(min=1, help="new tokens behind it, computed in one step")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="repetitions, alternating; medians are reported")] = 7,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="draw layers over time (needs headrace[plot])")
    ] = None,
    json: Json = False,
) -> None:
    """A stored prefix and a new suffix that take equally long to load and to compute, one tier throttled for that."""
    from headrace.bench import pipeline as measuring
    from headrace.bench import plot as drawing

    drawing.check(plot)
    result = measuring.measure(config, prefix_chunks, suffix_tokens, rounds)
    if plot is not None:
        drawing.layers(result.typical(), "Stored prefix, new suffix", plot)
    report("Layer pipeline", result.summary(), as_json=json)
