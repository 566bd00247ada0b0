"""`headrace bench batch-orders`: offline jobs in several orders on the engine itself."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.report import print_json, print_table, show
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig

_DEFAULT = ("fcfs", "dfs", "blend")


@with_settings(EngineConfig)
def bench_batch_orders(
    config: EngineConfig,
    mix: Annotated[list[str] | None, typer.Option(help="prefixes|even|replies; repeat; default: all")] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(help="fcfs|random|dfs|balance|blend|oracle (knows lengths); repeat; default: fcfs, dfs, blend"),
    ] = None,
    pool_tokens: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="of the KV pool, without --kv-memory")
    ] = 8064,
    peer_command: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="a peer program; {requests} is the file, its last line JSON with its rates"),
    ] = None,
    workload_seed: Annotated[int, typer.Option(help="of the jobs")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="repetitions, alternating; medians are reported")] = 3,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the result (needs headrace[plot])")] = None,
    json: Json = False,
) -> None:
    """Run offline jobs in one order after the other: what each takes, and what was predicted."""
    from headrace.bench import batch_orders as measuring
    from headrace.bench import plot as drawing
    from headrace.bench.batch_mixes import MIXES, make_job
    from headrace.bench.local_engine import LocalEngine, with_pool_of
    from headrace.core.errors import ConfigError
    from headrace.offline.planning.admission import check_order

    drawing.check(plot)
    orders = list(dict.fromkeys(order or _DEFAULT))
    for name in orders:
        check_order(name, oracle=True)
    mixes = list(dict.fromkeys(mix or MIXES))
    for name in mixes:
        if name not in MIXES:
            raise ConfigError(f"--mix: {name!r} is not one of {', '.join(MIXES)}")
    config = replace(config, store=replace(config.store, store=False))  # what an order reuses must come from the pool
    engine = LocalEngine(with_pool_of(config, pool_tokens))
    vocab_size = min(40000, engine.info.vocab_size)
    results = {
        name: measuring.measure(engine, make_job(name, workload_seed, vocab_size), orders, peer_command, rounds, name)
        for name in mixes
    }
    if plot is not None:
        walls = {
            f"{name} {one}": [run.wall_s for run in runs] for name, r in results.items() for one, runs in r.runs.items()
        }
        drawing.bars(walls, "seconds", "Offline jobs by order", plot)
    if json:
        print_json({name: result.summary() for name, result in results.items()})
        return
    for name, result in results.items():
        summary = result.summary()
        rows = summary.pop("orders")
        columns = ("order", *next(iter(rows.values())))
        print_table(f"Job {name}", columns, [[one, *map(show, values.values())] for one, values in rows.items()])
        print_table(f"Job {name}", ("", "value"), [[key, show(value)] for key, value in summary.items()])
