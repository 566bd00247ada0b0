"""`headrace bench batch-online`: what online requests feel of a batch, and it of them."""

from typing import Annotated

import typer

from headrace.bench.report import report
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig


@with_settings(EngineConfig)
def bench_batch_online(
    config: EngineConfig,
    requests: Annotated[int, typer.Option(min=2, help="online requests of a phase")] = 40,
    rate: Annotated[float, typer.Option(min=0.01, help="online requests per second")] = 1.0,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="length of their prompts")] = 200,
    output_tokens: Annotated[int, typer.Option(min=1, help="length of their answers")] = 16,
    vocab_size: Annotated[int, typer.Option(min=10, help="token ids of all prompts are below this")] = 40000,
    rounds: Annotated[int, typer.Option(min=1, help="repetitions of all phases, alternating")] = 2,
    json: Json = False,
) -> None:
    """Online prompts during a batch: time to first token against an idle server's, and the batch's slowdown."""
    from headrace.bench.batch_online import Load, measure

    result = measure(config, Load(requests, rate, prompt_tokens, output_tokens, vocab_size), rounds)
    report("Batch beside online requests", result, as_json=json)
