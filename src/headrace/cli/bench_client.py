"""`headrace bench serve`: load for any OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.report import report
from headrace.cli.options import Json
from headrace.core.errors import ConfigError


def bench_serve(
    url: Annotated[str, typer.Option(help="address of the server")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="model to ask for")] = "default",
    api_key: Annotated[str | None, typer.Option(help="key of the server")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second; inf: all at once")] = None,
    cv: Annotated[float, typer.Option(help="coefficient of variation of the gaps; 1: Poisson, above: bursts")] = 1.0,
    requests: Annotated[Path | None, typer.Option(metavar="FILE", help="OpenAI batch JSONL; default: mixed")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Azure CSV or Mooncake JSONL trace")] = None,
    time_scale: Annotated[float, typer.Option(help="stretch the times of a trace by this factor")] = 1.0,
    limit: Annotated[int, typer.Option(min=0, help="only so many requests; 0: all")] = 0,
    max_tokens: Annotated[int, typer.Option(min=0, help="cut outputs to this length; 0: as asked")] = 0,
    max_prompt: Annotated[int, typer.Option(min=0, help="cut prompts of a trace to this length; 0: never")] = 0,
    vocab_size: Annotated[int, typer.Option(help="token ids of synthesised prompts are below this")] = 40000,
    slo: Annotated[
        str | None, typer.Option(help="bounds that make a request good, e.g. ttft=2s,itl=200ms (also tpot, e2e)")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the arrivals")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the latencies (needs headrace[plot])")] = None,
    json: Json = False,
) -> None:
    """Send requests when they are due, as Gamma arrivals or as a trace says, and report what clients felt."""
    import asyncio

    from headrace.bench import plot as drawing
    from headrace.bench import serve as load
    from headrace.bench.latency_stats import parse_slo, summarise
    from headrace.bench.progress import progress
    from headrace.bench.stream_client import Endpoint

    if requests is not None and trace is not None:
        raise ConfigError("--requests and --trace exclude each other; give one")
    bounds = parse_slo(slo) if slo else None
    drawing.check(plot)
    if trace is not None:
        calls = load.calls_from_trace(
            trace, limit=limit, vocabulary=vocab_size, max_prompt=max_prompt, time_scale=time_scale
        )
    else:
        calls = load.calls_from_file(requests) if requests else load.default_calls()
    calls = load.limited(calls, limit, max_tokens)
    due = load.schedule(calls, rate, cv, seed)
    endpoint = Endpoint(url.rstrip("/").removesuffix("/v1"), model, api_key)
    with progress(f"requests to {endpoint.url}", len(calls)) as advance:
        seen = asyncio.run(load.run(endpoint, calls, due, advance))
    if plot is not None:
        good = [one for one in seen if one.error is None and one.arrivals]
        series = {
            "TTFT": [one.ttft for one in good],
            "ITL": [gap for one in good for gap in one.gaps],
            "end to end": [one.e2e for one in good],
        }
        drawing.distributions({name: values for name, values in series.items() if values}, plot)
    result = summarise(seen, bounds)
    report(f"Load on {endpoint.url}", result, as_json=json)
    if result["failed"]:
        raise typer.Exit(1)
