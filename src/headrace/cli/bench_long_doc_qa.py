"""`headrace bench long-doc-qa`: questions about long documents whose KV lies in storage tiers."""

import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from headrace.bench.report import print_json, print_table, show
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.settings import nearest


@with_settings(EngineConfig)
def bench_long_doc_qa(
    config: EngineConfig,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="LooGLE JSONL with `input` and `qa_pairs`; default: random")
    ] = None,
    windows: Annotated[int, typer.Option(min=2, help="parts of documents")] = 20,
    window: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="length of each")] = 7500,
    questions: Annotated[int, typer.Option(min=1, help="about each, never two in a row about the same")] = 4,
    outputs: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 16,
    new: Annotated[int, typer.Option(min=0, help="prompts beside that nobody asked before, so that saves happen")] = 2,
    new_tokens: Annotated[int, typer.Option(min=1, help="length of each")] = 600,
    pool_windows: Annotated[float, typer.Option(min=1.0, help="windows in the KV pool, without --kv-memory")] = 4.3,
    work_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="where the tiers lie; kept and used again"),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="step of the ablation; repeat; default: all; the first is compared with")
    ] = None,
    ratio: Annotated[float, typer.Option(min=1.0, help="rate of the faster tier over the slower one's")] = 3.0,
    read_share: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="of the time that request by request reads are to take")
    ] = 0.82,
    fast_rate: Annotated[
        float, typer.Option(min=0.0, metavar="MB/S", help="of the faster tier, in place of --read-share")
    ] = 0.0,
    throttle: Annotated[bool, typer.Option(help="slow the tiers down; without, both are the disk as it is")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="repetitions, alternating; medians are reported")] = 3,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the result (needs headrace[plot])")] = None,
    json: Json = False,
) -> None:
    """Answer questions about long documents from two storage tiers, one step of the ablation after the other."""
    from headrace.bench import long_doc_qa as measuring
    from headrace.bench import plot as drawing
    from headrace.bench.local_engine import model_folder, tokenizer_of
    from headrace.bench.long_doc_prompts import random_windows, read_windows

    drawing.check(plot)
    names = list(dict.fromkeys(policy or measuring.POLICIES))
    for name in names:
        if name not in measuring.POLICIES:
            known = list(measuring.POLICIES)
            raise ConfigError(f"--policy: {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    tokenizer = tokenizer_of(config.model.tokenizer or model_folder(config))
    tokenizer.model_max_length = sys.maxsize  # documents are cut before the model sees them: no warning
    if data is None:
        texts = random_windows(windows, window, questions, len(tokenizer))
    else:
        texts = read_windows(data, tokenizer, windows, window, questions)
    with nullcontext(work_dir) if work_dir else TemporaryDirectory(prefix="headrace-bench-") as folder:
        work = measuring.Workload(texts, new, new_tokens, outputs)
        bench = measuring.LongDocQA(config, Path(folder), work, pool_windows)
        filled = bench.fill()
        if not throttle:
            speeds = measuring.Speeds()
        elif fast_rate:
            speeds = measuring.Speeds(fast_rate * 1e6, fast_rate * 1e6 / ratio)
        else:
            speeds = measuring.speeds_for(bench, read_share, ratio)
        result = measuring.compare(bench, names, speeds, rounds)
    summary = {**result.summary(), "fill_s": round(filled, 1)}
    if plot is not None:
        rates = {name: [run.tokens / run.wall_s for run in runs] for name, runs in result.runs.items()}
        drawing.bars(rates, "tokens/s, prompt and output", "Questions about stored documents", plot)
    if json:
        print_json(summary)
        return
    policies = summary.pop("policies")
    columns = ("policy", *next(iter(policies.values())))
    print_table("Policies", columns, [[name, *map(show, one.values())] for name, one in policies.items()])
    print_table("Questions about stored documents", ("", "value"), [[name, show(v)] for name, v in summary.items()])
