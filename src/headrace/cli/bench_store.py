"""`headrace bench store`: what several tiers give together."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.report import print_json, print_table, show
from headrace.cli.options import Json
from headrace.core.errors import ConfigError
from headrace.core.settings import parse_size

#: Of the memory tier beside a disk: at a GB/s a read is served sooner than a busy machine wakes who waits for it.
_DEPTH = 8


def bench_store(
    tier: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="a tier, e.g. dir:/mnt/nvme:4GiB; repeat; default: two throttled ones"),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="a folder, and memory throttled to the rate just measured of it"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="completion|static|sequential", help="how tiers share reads; repeat to compare"),
    ] = None,
    hedge: Annotated[bool, typer.Option(help="issue slow reads again elsewhere (completion)")] = True,
    chunks: Annotated[int, typer.Option(min=1, help="chunks of 128 tokens on every tier")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="requests of the step; each reads all chunks")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="layers of the model")] = 30,
    kv_heads: Annotated[int, typer.Option(min=1, help="kv heads of a layer")] = 3,
    head_dim: Annotated[int, typer.Option(min=1, help="elements of a key")] = 64,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16|float16", help="of the KV")] = "float32",
    unit_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="bytes read at once; default: by the size of the step")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="repetitions, alternating; medians are reported")] = 3,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the result (needs headrace[plot])")] = None,
    json: Json = False,
) -> None:
    """Read chunks from several tiers at once, past the page cache, beside what each tier gives alone."""
    from headrace.bench import plot as drawing
    from headrace.bench import store as measuring
    from headrace.bench.store_chunks import chunk_bytes, scratch_tiers, write_chunks
    from headrace.store.layout import KVLayout
    from headrace.store.read_policies import POLICIES

    drawing.check(plot)
    policies = list(dict.fromkeys(policy or ["completion"]))
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"--policy: {name!r} is not one of {', '.join(POLICIES)}")
    if disk is not None and tier:
        raise ConfigError("--disk and --tier exclude each other; give one")
    try:
        unit_bytes = None if unit_size is None else parse_size(unit_size)
    except ValueError as error:
        raise ConfigError(f"--unit-size: {error}") from None
    layout = KVLayout("be" * 32, layers, kv_heads, head_dim, dtype)
    specs = list(tier or measuring.VARYING_TIERS)
    if disk is not None:
        room = f"{chunks * chunk_bytes(layout) // 2**20 + 1}MiB"
        with scratch_tiers([f"dir:{disk}:{room}"]) as only:
            work = measuring.Workload(layout, write_chunks(only, layout, chunks), requests, unit_bytes)
            rate = measuring.read(only, work, "completion").rate
        specs = [f"dir:{disk}:{room}", f"throttled:{int(rate)}B/s,depth={_DEPTH}:memory:{room}"]
    with scratch_tiers(specs) as tiers:
        work = measuring.Workload(layout, write_chunks(tiers, layout, chunks), requests, unit_bytes, hedge)
        result = measuring.measure(tiers, work, policies, rounds)
    summary = result.summary()
    if plot is not None:
        bars = {f"{name} alone": [run.rate / 1e9 for run in runs] for name, runs in zip(result.tiers, result.alone)}
        bars |= {name: [run.rate / 1e9 for run in runs] for name, runs in result.together.items()}
        drawing.bars(bars, "GB/s", "Reads from several tiers", plot)
    if json:
        print_json(summary)
        return
    columns = ("tier", "alone GB/s", "together GB/s", "capacity GB/s")
    print_table("Tiers", columns, [[show(value) for value in one.values()] for one in summary.pop("tiers")])
    columns = ("policy", "GB/s", "share of the sum", "elapsed / best alone")
    rows = [[name, *map(show, one.values())] for name, one in summary.pop("policies").items()]
    print_table("Policies", columns, rows)
    print_table("Reads", ("", "value"), [[name, show(value)] for name, value in summary.items()])
