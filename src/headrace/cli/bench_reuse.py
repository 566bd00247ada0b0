"""`headrace bench reuse`: what the store costs where little is reused."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.report import report
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError


@with_settings(EngineConfig)
def bench_reuse(
    config: EngineConfig,
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="of prompt tokens that were there before")] = 0.04,
    warm: Annotated[int, typer.Option(min=1, help="requests before the measured ones")] = 200,
    pairs: Annotated[int, typer.Option(min=1, help="blocks of requests, each on every engine in turn")] = 9,
    block: Annotated[int, typer.Option(min=1, help="requests of a block")] = 12,
    clients: Annotated[int, typer.Option(min=1, help="requests in flight")] = 4,
    shortest: Annotated[int, typer.Option(min=1, help="tokens of the shortest prompt")] = 256,
    longest: Annotated[int, typer.Option(min=1, help="tokens of the longest prompt")] = 1500,
    outputs: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 4,
    vocab_size: Annotated[int, typer.Option(min=101, help="token ids of the prompts are below this")] = 40000,
    workload_seed: Annotated[int, typer.Option(help="of the requests")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the result (needs headrace[plot])")] = None,
    json: Json = False,
) -> None:
    """Engines with the store off, with everything saved to one tier, and as the policy decides, side by side."""
    from headrace.bench import plot as drawing
    from headrace.bench import reuse as measuring
    from headrace.bench.local_engine import with_cache
    from headrace.core.paths import home

    drawing.check(plot)
    if shortest > longest:
        raise ConfigError(f"--shortest {shortest} is above --longest {longest}")
    if not config.cache.kv_memory:  # small, so that what is used again is mostly not in the pool any more
        config = with_cache(config, kv_memory=512 << 20)
    tiers = config.store.tier or ("memory:512MiB", f"dir:{home() / 'bench'}:4GiB")
    plan = measuring.Plan(warm, pairs, block, clients)
    batch = measuring.requests(warm + pairs * block, share, shortest, longest, outputs, vocab_size, workload_seed)
    result = measuring.measure(config, tiers, batch, plan)
    if plot is not None:
        values = {name: [run.ttft * 1e3 for run in runs] for name, runs in result.runs.items()}
        drawing.bars(values, "mean TTFT of a block (ms)", f"{result.share:.1%} of prompt tokens are old", plot)
    report("Little reuse", result.summary(), as_json=json)
