"""`headrace bench batch-dp`: a job on one engine, on two, and on two of which one is slow."""

from dataclasses import replace
from typing import Annotated

import typer

from headrace.bench.report import report
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig


@with_settings(EngineConfig)
def bench_batch_dp(
    config: EngineConfig,
    mix: Annotated[str, typer.Option(help="the job: prefixes|even|replies")] = "even",
    order: Annotated[str, typer.Option(help="of its requests: blend|dfs|balance|random|fcfs")] = "blend",
    times: Annotated[int, typer.Option(min=1, help="how many such jobs make one")] = 1,
    pool_tokens: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="of each KV pool, without --kv-memory")
    ] = 8064,
    workload_seed: Annotated[int, typer.Option(help="of the job")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="repetitions, alternating; medians are reported")] = 3,
    json: Json = False,
) -> None:
    """Run a job on one engine of one thread, on two, and on two of which a CPU quota slows one to half."""
    from headrace.bench.batch_dp import measure
    from headrace.bench.batch_mixes import make_job, several
    from headrace.bench.local_engine import model_folder, with_pool_of
    from headrace.model.memory import read_config
    from headrace.offline.planning.admission import check_order

    check_order(order)
    config = replace(config, store=replace(config.store, store=False))  # what is reused must come from the pools
    config = with_pool_of(config, pool_tokens)
    vocab_size = min(40000, int(read_config(model_folder(config)).get("vocab_size", 40000)))
    job = several([make_job(mix, workload_seed + number, vocab_size) for number in range(times)])
    report("A job on several engines", measure(config, job, order, rounds), as_json=json)
