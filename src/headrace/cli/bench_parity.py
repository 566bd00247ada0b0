"""`headrace bench parity`."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.bench.report import print_json, print_table
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.settings import nearest

if TYPE_CHECKING:
    from headrace.bench.parity import Outcome


@with_settings(EngineConfig)
def bench_parity(
    config: EngineConfig,
    requests: Annotated[Path | None, typer.Option(metavar="FILE", help="prompts: OpenAI batch JSONL")] = None,
    outputs: Annotated[int, typer.Option(min=1, help="tokens to generate for built-in prompts")] = 24,
    families: Annotated[
        str, typer.Option(help="tiny random models to check too: all, none, or names with commas")
    ] = "all",
    modes: Annotated[str, typer.Option(help="all, or names with commas, e.g. alone,batched")] = "all",
    skip_model: Annotated[bool, typer.Option(help="check only the tiny models")] = False,
    long_context: Annotated[
        int, typer.Option(min=0, help="also one prompt of so many tokens (e.g. 40000) on a tiny 64k-context model")
    ] = 0,
    json: Json = False,
) -> None:
    """Compare greedy outputs (fp32) with plain Transformers, however the engine came to them."""
    from headrace.bench.local_engine import model_folder, tokenizer_of
    from headrace.bench.parity import MODES, check, summary
    from headrace.bench.parity_long import check_long
    from headrace.bench.parity_prompts import LENGTHS, SHORT_LENGTHS, random_prompts, text_prompts
    from headrace.bench.progress import progress
    from headrace.bench.tiny_models import FAMILIES, VOCABULARY, save
    from headrace.bench.workload import forced_lengths, read_requests

    chosen = _names(families, tuple(FAMILIES), "--families")
    wanted = _names(modes, MODES, "--modes")
    outcomes: list[Outcome] = []
    memory: dict[str, float] = {}
    total = len(wanted) * (len(chosen) + (not skip_model))
    with TemporaryDirectory() as scratch, progress("parity", total) as advance:
        if not skip_model:
            folder = model_folder(config)
            if requests is not None:
                batch = forced_lengths(read_requests(requests, lambda: tokenizer_of(folder)))
            else:
                batch = text_prompts(tokenizer_of(folder), LENGTHS, outputs)
            outcomes += check(config.model.model, folder, config, batch, wanted, advance)
        for family in chosen:
            tiny = save(family, Path(scratch) / family)
            batch = random_prompts(VOCABULARY, SHORT_LENGTHS, outputs)
            outcomes += check(family, tiny, config, batch, wanted, advance)
        if long_context:
            outcome, memory = check_long(Path(scratch) / "long", config, long_context, outputs)
            outcomes.append(outcome)
    result = {**summary(outcomes), **memory}
    if json:
        print_json(result)
    else:
        _print(outcomes, memory)
    if not result["holds"]:
        raise typer.Exit(1)


def _names(text: str, known: tuple[str, ...], flag: str) -> tuple[str, ...]:
    if text == "all":
        return known
    names = tuple(name.strip() for name in text.split(",") if name.strip() and text != "none")
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag}: {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    return names


def _print(outcomes: "Sequence[Outcome]", memory: dict[str, float]) -> None:
    rows = []
    for o in outcomes:
        margin = max((v.divergence_margin for v in o.verdicts if not v.exact), default=0.0)
        verdict = "holds" if o.holds else f"[red]broken[/red]{': ' + o.fault if o.fault else ''}"
        near = len(o.verdicts) - o.exact
        rows.append(
            (o.model, o.mode, str(len(o.verdicts)), str(o.exact), str(near), f"{o.worst:.1e}", f"{margin:.1e}", verdict)
        )
    columns = ("model", "mode", "outputs", "exact", "differ", "worst margin", "margin where differing", "")
    print_table("Parity with plain Transformers (margins in standard deviations of the logits)", columns, rows)
    for name, value in memory.items():
        print(f"{name}: {value:,.0f}")
