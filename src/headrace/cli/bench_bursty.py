"""`headrace bench bursty`: time to first token in bursts of requests whose prefixes lie in slow tiers."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.report import report
from headrace.cli.options import Json
from headrace.core.errors import ConfigError
from headrace.core.settings import parse_size

#: Token ids of prompts for a model that is not the tiny one are below this.
OTHER_VOCABULARY = 40000


def bench_bursty(
    model: Annotated[str, typer.Option(help="tiny: random weights, so that retrieving is what takes time")] = "tiny",
    tier: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="tiers that all hold all prefixes; the faster one first")
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="requests of a run")] = 400,
    prefixes: Annotated[int, typer.Option(min=1, help="different prefixes")] = 64,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="tokens of a prefix")] = 2048,
    suffix_tokens: Annotated[int, typer.Option(min=1, help="tokens behind it")] = 24,
    outputs: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 2,
    pool: Annotated[str, typer.Option(metavar="SIZE", help="the KV pool; a fraction of all prefixes")] = "208MiB",
    cv: Annotated[float, typer.Option(min=0.0, help="coefficient of variation of the gaps between requests")] = 4.0,
    load: Annotated[
        list[float] | None, typer.Option(help="arrivals as a share of the sequential policy's saturation; repeat")
    ] = None,
    beyond: Annotated[
        list[float] | None, typer.Option(help="loads that only ours has to carry; repeat; default: up to 2")
    ] = None,
    seed: Annotated[int, typer.Option(help="of requests and arrivals")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the result (needs headrace[plot])")] = None,
    json: Json = False,
) -> None:
    """Completion-driven reads from all tiers against reading request by request from the first one."""
    from tempfile import TemporaryDirectory

    from headrace.bench import bursty as measuring
    from headrace.bench import plot as drawing
    from headrace.bench.local_engine import with_cache
    from headrace.bench.store_chunks import scratch_tiers, unthrottled
    from headrace.bench.tiny_models import VOCABULARY, save
    from headrace.core.config import EngineConfig, ModelConfig
    from headrace.store.tiers.spec import parse_spec

    drawing.check(plot)
    try:
        kv_memory = parse_size(pool)
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from None
    both = load or [0.6, 0.8, 0.95]
    if min(both) <= 0:
        raise ConfigError(f"--load must be above 0, got {min(both)}")
    ours = [*both, *([1.2, 1.5, 1.8] if beyond is None else beyond)]
    specs = tier or ["throttled:300MB/s:memory:2GiB", "throttled:300MB/s:memory:2GiB"]
    with TemporaryDirectory(prefix="headrace-bench-") as scratch, scratch_tiers(specs) as tiers:
        name, vocabulary = model, OTHER_VOCABULARY
        if model == "tiny":
            name, vocabulary = str(save("llama", Path(scratch), **measuring.TINY)), VOCABULARY
        config = with_cache(EngineConfig(model=ModelConfig(model=name)), kv_memory=kv_memory)
        batch, heads = measuring.requests(requests, prefixes, prefix_tokens, suffix_tokens, outputs, vocabulary, seed)
        slow = [measuring.SlowTier(unthrottled(made), parse_spec(text).throttle) for made, text in zip(tiers, specs)]
        result = measuring.measure(config, slow, batch, heads, {"sequential": both, "ours": ours}, cv, seed)
    if plot is not None:
        drawing.load_curves(
            {name: {at: run.ttft for at, run in runs.items()} for name, runs in result.runs.items()},
            {name: {at: (run.arrivals, run.backlog) for at, run in runs.items()} for name, runs in result.runs.items()},
            plot,
        )
    sizes = {"requests": requests, "prefixes": prefixes, "prefix_tokens": prefix_tokens, "cv": cv, "tiers": specs}
    report("Bursty arrivals", sizes | result.summary(), as_json=json)
