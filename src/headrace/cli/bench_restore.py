"""`headrace bench restore`: a prompt asked again after a restart."""

from typing import Annotated

import typer

from headrace.bench.report import report
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig


@with_settings(EngineConfig)
def bench_restore(
    config: EngineConfig,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="length of the prompt")] = 4000,
    tokens: Annotated[int, typer.Option(min=3, help="tokens to generate")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="restarts, each with a new prompt; medians are reported")] = 5,
    json: Json = False,
) -> None:
    """A prompt asked again after a restart, with a cold page cache: one folder as --tier (default: HEADRACE_HOME)."""
    from headrace.bench.restore import measure, summary

    report("Restore", summary(measure(config, prompt_tokens, tokens, rounds)), as_json=json)
