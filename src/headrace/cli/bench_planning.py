"""`headrace bench planning`: what planning a large batch takes."""

from typing import Annotated

import typer

from headrace.bench.report import print_json, print_table, show
from headrace.cli.options import Json


def bench_planning(
    requests: Annotated[
        list[int] | None, typer.Option(min=1, help="in a file; repeat, ascending; default: 100000, 200000, 400000")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="of a prompt, on average")] = 1000,
    seed: Annotated[int, typer.Option(help="of the files")] = 0,
    json: Json = False,
) -> None:
    """Read and plan batch files of prompts as token ids, on one core: seconds and memory by size."""
    from headrace.bench.planning import measure

    result = measure(sorted(requests or (100_000, 200_000, 400_000)), prompt_tokens, seed)
    if json:
        print_json(result)
        return
    sizes = result.pop("sizes")
    print_table("Planning on one core", tuple(sizes[0]), [[show(value) for value in one.values()] for one in sizes])
    print_table("Planning", ("", "value"), [[name, show(value)] for name, value in result.items()])
