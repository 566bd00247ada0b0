"""`headrace store`: what lies in the configured tiers, with or without a server that uses them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.bench.report import print_json, print_table
from headrace.cli.options import Json
from headrace.core.config import Config, StoreConfig
from headrace.core.errors import ConfigError
from headrace.core.settings import parse_duration, resolve

if TYPE_CHECKING:
    from headrace.store.catalog.catalog import Catalog
    from headrace.store.tiers.tier import Tier

store = typer.Typer(help="List, check and clear the KV store.", no_args_is_help=True, rich_markup_mode=None)

Tiers = Annotated[
    list[str] | None,
    typer.Option(
        "--tier", metavar="TIER", help="a storage tier as `serve` takes it, may be repeated (env: HEADRACE_TIER)"
    ),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file of settings")]


@store.command()
def stats(tier: Tiers = None, config: ConfigFile = None, json: Json = False) -> None:
    """How full each tier is."""
    rows: list[dict[str, Any]] = []
    with _opened(tier, config) as (_, opened):
        for each, catalog in opened:
            usage = catalog.usage()
            rows.append(
                {
                    "tier": each.name,
                    "capacity_bytes": usage.capacity,
                    "used_bytes": usage.used,
                    "parts": usage.parts,
                    "evicted": usage.evicted,
                    "dropped": usage.dropped,
                }
            )
    if json:
        print_json({"tiers": rows})
        return
    shown = [
        (r["tier"], _size(r["capacity_bytes"]), _size(r["used_bytes"]), f"{r['parts']:,}", f"{r['evicted']:,}")
        for r in rows
    ]
    print_table("KV store", ("tier", "capacity", "used", "parts", "evicted"), shown)


@store.command()
def ls(tier: Tiers = None, config: ConfigFile = None, json: Json = False) -> None:
    """List all parts: chunk, model, tokens, layers, kv heads, size and age."""
    from headrace.store.maintenance import Inspector

    rows: list[dict[str, Any]] = []
    now = time.time()
    with _opened(tier, config) as (_, opened):
        for each, _catalog in opened:
            with Inspector(each) as inspector:
                for part in inspector.parts():
                    range_, header = part.scanned.part.range, part.header
                    rows.append(
                        {
                            "tier": each.name,
                            "key": part.scanned.part.key.hex(),
                            "layers": [range_.first_layer, range_.last_layer],
                            "heads": [range_.first_head, range_.last_head],
                            "bytes": part.scanned.nbytes,
                            "unused_s": round(max(0.0, now - part.scanned.used_at), 1),
                            "model": header.fingerprint.hex() if header else None,
                            "tokens": header.n_tokens if header else None,
                            "dtype": header.dtype if header else None,
                            "salt_tag": header.salt_tag.hex() if header else None,
                            "problem": part.problem or None,
                        }
                    )
    if json:
        print_json({"parts": rows})
        return
    shown = [
        (
            r["tier"],
            r["key"][:16],
            (r["model"] or "?")[:12],
            r["problem"] or f"{r['tokens']} {r['dtype']}",
            "{}-{}".format(*r["layers"]),
            "{}-{}".format(*r["heads"]),
            _size(r["bytes"]),
            f"{r['unused_s']:,.0f} s",
        )
        for r in rows
    ]
    columns = ("tier", "chunk", "model", "tokens", "layers", "heads", "size", "unused for")
    print_table(f"{len(rows):,} parts", columns, shown)


@store.command()
def verify(
    tier: Tiers = None,
    config: ConfigFile = None,
    repair: Annotated[bool, typer.Option("--repair", help="delete what is wrong")] = False,
    json: Json = False,
) -> None:
    """Read everything and check headers and sums; exit code 1 when something is wrong and stays."""
    from headrace.store.maintenance import verify as verify_tier

    rows: list[dict[str, Any]] = []
    with _opened(tier, config) as (_, opened):
        for each, catalog in opened:
            found = verify_tier(each, catalog, repair)
            rows.append(
                {
                    "tier": each.name,
                    "parts": found.parts,
                    "bytes": found.nbytes,
                    "wrong": found.wrong,
                    "unreadable": found.unreadable,
                    "removed": found.removed,
                    "gb_per_s": round(found.nbytes / 1e9 / max(found.seconds, 1e-9), 3),
                }
            )
    if json:
        print_json({"tiers": rows})
    else:
        for r in rows:
            for problem in (*r["wrong"], *r["unreadable"]):
                print(f"{r['tier']}: {problem}")
            left = f"{len(r['wrong'])} wrong, {len(r['unreadable'])} unreadable, {r['removed']} removed"
            print(f"{r['tier']}: {r['parts']:,} parts, {_size(r['bytes'])} read at {r['gb_per_s']} GB/s: {left}")
    if any(len(r["wrong"]) + len(r["unreadable"]) > r["removed"] for r in rows):
        raise typer.Exit(1)


@store.command()
def gc(
    tier: Tiers = None,
    config: ConfigFile = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="DURATION", help="unused for so long; default: --store-ttl's")
    ] = None,
    json: Json = False,
) -> None:
    """Delete parts that were not used for long, and what dead writers left unfinished."""
    from headrace.store.maintenance import collect

    rows: list[dict[str, Any]] = []
    with _opened(tier, config) as (settings, opened):
        age = settings.store_ttl if older_than is None else _duration(older_than)
        for each, catalog in opened:
            parts, nbytes = collect(each, catalog, age, time.time())
            rows.append({"tier": each.name, "removed": parts, "freed_bytes": nbytes})
    _tell_removed(rows, json)


@store.command()
def purge(
    tier: Tiers = None,
    config: ConfigFile = None,
    salt: Annotated[
        str | None, typer.Option("--salt", help="only what was saved under this cache_salt; default: everything")
    ] = None,
    json: Json = False,
) -> None:
    """Delete everything, or everything of one cache salt; what a server holds in its pool is not touched."""
    from headrace.store.maintenance import purge as purge_tier

    rows: list[dict[str, Any]] = []
    with _opened(tier, config) as (_, opened):
        for each, catalog in opened:
            parts, nbytes = purge_tier(each, catalog, salt)
            rows.append({"tier": each.name, "removed": parts, "freed_bytes": nbytes})
    _tell_removed(rows, json)


@contextmanager
def _opened(
    tiers: list[str] | None, config: Path | None
) -> Iterator[tuple[StoreConfig, list[tuple["Tier", "Catalog"]]]]:
    """The configured tiers with their catalogs: ours for as long as it takes, or of the server that runs."""
    from headrace.store.catalog.election import open_catalog
    from headrace.store.opening import configured_tiers

    settings = resolve(StoreConfig, {"tier": tiers or None}, root=Config, file=config)
    opened: list[tuple[Tier, Catalog]] = []
    made = configured_tiers(settings.tier)
    try:
        for tier in made:
            # Looking after a tier must not make it smaller: room is what a server makes when it needs some.
            tier.capacity = max(tier.capacity, sum(scanned.nbytes for scanned in tier.scan()))
            opened.append((tier, open_catalog(tier)))
        yield settings, opened
    finally:
        for _, catalog in opened:
            catalog.close()
        for tier in made:
            tier.close()


def _tell_removed(rows: list[dict[str, Any]], json: bool) -> None:
    if json:
        print_json({"tiers": rows})
        return
    for r in rows:
        print(f"{r['tier']}: {r['removed']:,} parts removed, {_size(r['freed_bytes'])} freed")


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"--older-than: {text!r} is not a duration such as 2d ({error})") from None


def _size(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:,.1f} MiB"
