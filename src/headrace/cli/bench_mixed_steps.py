"""`headrace bench mixed-steps`: decode rows and prompt rows in one step."""

from dataclasses import replace
from typing import Annotated

import typer

from headrace.bench.report import print_json, print_table, show
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError

_DEFAULT = ("32+32", "32+128", "32+448")


@with_settings(EngineConfig)
def bench_mixed_steps(
    config: EngineConfig,
    mix: Annotated[
        list[str] | None,
        typer.Option(metavar="N+M", help=f"N sequences decode, a prompt of M; repeat; default: {', '.join(_DEFAULT)}"),
    ] = None,
    context: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="that decoding sequences look back on")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="repetitions, alternating; medians are reported")] = 3,
    json: Json = False,
) -> None:
    """Decode rows and prompt rows in steps of their own and in one: what overlaps on this device."""
    from headrace.bench.local_engine import LocalEngine
    from headrace.bench.mixed_steps import measure

    mixes = [_pair(text) for text in mix or _DEFAULT]
    engine = LocalEngine(replace(config, store=replace(config.store, store=False)))
    found = [each.summary() for each in measure(engine, mixes, context, rounds)]
    if json:
        print_json({"device": engine.info.device_name, "overlap": engine.info.overlap, "mixes": found})
        return
    print_table("Steps", tuple(found[0]), [[show(value) for value in each.values()] for each in found])


def _pair(text: str) -> tuple[int, int]:
    decoding, _, prompt = text.partition("+")
    if not (decoding.isdecimal() and prompt.isdecimal() and int(decoding) and int(prompt)):
        raise ConfigError(f"--mix: {text!r} is not N+M, e.g. 32+128")
    return int(decoding), int(prompt)
