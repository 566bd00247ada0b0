"""`headrace plan`: what a batch file asks for, what each order of its requests takes, and the file reordered."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import Json
from headrace.core.config import MAX_SEQS, MAX_STEP_TOKENS, SchedulerConfig
from headrace.core.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.offline.plan_input import Bodies, PlanInput
    from headrace.offline.planning.target import Target

_ACCELERATOR_SEQS, _ACCELERATOR_TOKENS = 512, 2048  # what serving engines use on large accelerators


def plan(
    requests: Annotated[Path, typer.Argument(metavar="FILE", help="OpenAI batch JSONL; prompts may be token ids")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="write the lines in the blended order")
    ] = None,
    model: Annotated[
        str, typer.Option(help="model to plan for: as for serve, or the name of a preset such as llama-3-8b")
    ] = "default",
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda|A100|H100|H200|L40S", help="device to plan for")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of the engine; 0: all cores")] = 0,
    dtype: Annotated[str, typer.Option(metavar="auto|float32|bfloat16|float16", help="of the weights")] = "auto",
    kv_tokens: Annotated[
        int, typer.Option(min=0, max=1 << 40, help="tokens of the KV pool; 0: what the device has room for")
    ] = 0,
    max_num_seqs: Annotated[
        int, typer.Option(min=0, max=MAX_SEQS, help="sequences at once; 0: as the engine's default")
    ] = 0,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=0, max=MAX_STEP_TOKENS, help="tokens of a step; 0: by the device")
    ] = 0,
    order: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="an order to predict; repeat; default: all")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="results of an earlier run: their lengths are expected again")
    ] = None,
    output_share: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="share of max_tokens that is expected to be produced")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="of random orders and samples")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the batches over time")] = None,
    json: Json = False,
) -> None:
    """Tell what a batch asks for and how long it takes in each order; write it reordered for any engine."""
    import time

    import numpy as np

    from headrace.bench import plot as drawing
    from headrace.bench.progress import progress
    from headrace.cli.plan_show import show_plan
    from headrace.offline.jobs.lines import check_file
    from headrace.offline.plan_groups import MOST_GROUPS
    from headrace.offline.plan_lengths import expected_lengths
    from headrace.offline.plan_report import make_plan
    from headrace.offline.planning.admission import ORDERS, check_order
    from headrace.offline.planning.blend import PAGE

    drawing.check(plot, requests, output, lengths)
    orders = list(dict.fromkeys(order or ORDERS))
    for name in orders:
        check_order(name)
    if (output is not None or plot is not None) and "blend" not in orders:
        orders.append("blend")
    if output is not None and os.path.lexists(output):
        what = "is the file that is read" if output.exists() and output.samefile(requests) else "exists"
        raise ConfigError(f"-o {output} {what}; give another name")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.absolute().parent}")
    check_file(requests)
    target, folder = _target(model, device, threads, dtype, kv_tokens, max_num_seqs, max_num_batched_tokens)
    room = target.kv_tokens - PAGE  # of which the last page of a sequence may waste the most
    with progress(f"reading {requests.name}", max(1, requests.stat().st_size)) as advance:
        given = _read(requests, model, folder, target.kv_tokens, room, advance)
    expected = expected_lengths(given, lengths, output_share, room)
    begun = time.perf_counter()
    with progress("planning", len(orders) + min(MOST_GROUPS, len(given.names))) as advance:
        result = make_plan(
            given.requests, expected, target, orders, seed, known=lengths is not None, by_group=True, advance=advance
        )
    seconds = time.perf_counter() - begun
    if output is not None:
        _write(given, np.asarray(result.runs["blend"].order), requests, output)
    if plot is not None:
        drawing.composition(
            {name: result.runs[name] for name in ("dfs", "blend") if name in result.runs}, result.optimum_s, plot
        )
    times = {"read_s": given.read_s, "tokenize_s": given.tokenize_s, "plan_s": seconds}
    show_plan(result, given, target, times, output, json)


def _read(requests: Path, model: str, folder: Path | None, kv_tokens: int, room: int, advance: Any) -> "PlanInput":
    """The requests of a file, as the model understands them; for one without files with the default tokenizer."""
    from headrace.offline.model_limits import model_limits
    from headrace.offline.plan_input import read_plan_input

    name = Path(model).name if Path(model).exists() else model
    limits = model_limits(folder, name, kv_tokens, room)

    def bodies() -> "Bodies":
        from headrace.cli.plan_endpoint import PlanEndpoint
        from headrace.front.generation_config import default_sampling

        defaults = None if folder is None else default_sampling(folder)
        return PlanEndpoint(lambda: folder or _folder("default"), name, limits, defaults)

    return read_plan_input(requests, bodies, advance, limits)


def _folder(model: str) -> Path:
    if (Path(model) / "config.json").is_file():
        return Path(model)  # no weights are needed to plan
    from headrace.model import hub

    return hub.resolve(model)


def _target(
    model: str, device: str, threads: int, dtype: str, kv_tokens: int, max_seqs: int, step_tokens: int
) -> tuple["Target", Path | None]:
    """What to plan for, and the model's folder where it has one."""
    from headrace.offline.planning.target import Target
    from headrace.perf.model_config import PRESETS, preset, shape_of_folder
    from headrace.perf.presets import accelerator, memory_bytes, names
    from headrace.perf.profile import load_or_default

    named = device.upper().split("-")[0]
    if device == "auto":
        device = "cuda" if Path("/dev/nvidia0").exists() else "cpu"
    elif device not in ("cpu", "cuda") and named not in names():
        raise ConfigError(f"--device: {device!r} is not one of auto, cpu, cuda, {', '.join(names())}")
    kind = dtype if dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    shape = preset(model, kind)
    folder = None
    if shape is None:
        try:
            folder = _folder(model)
        except HeadraceError as error:
            raise ConfigError(f"{error}; models that need no files to plan for: {', '.join(PRESETS)}") from error
        shape = shape_of_folder(folder, kind)
    defaults = SchedulerConfig()
    if device == "cpu":
        profile = load_or_default("cpu", threads, kind)
    elif device == "cuda":
        profile = load_or_default("cuda", 0, kind)
    else:
        profile = accelerator(named, kind)
    large = device != "cpu"
    if not kv_tokens:
        weights = (shape.linear_params + 2 * shape.head_params) * shape.weight_itemsize
        weights += (shape.experts - shape.experts_per_token) * shape.expert_params * shape.weight_itemsize
        room = int(0.9 * memory_bytes(named if named in names() else "A100")) - weights if large else 4 << 30
        kv_tokens = room // shape.kv_bytes_per_token
        if kv_tokens < 1:
            raise ConfigError(f"{model} with {weights / 1e9:.0f} GB of weights leaves no room for KV on {device}")
    seqs = max_seqs or (_ACCELERATOR_SEQS if large else defaults.max_num_seqs)
    tokens = step_tokens or (_ACCELERATOR_TOKENS if large else defaults.max_num_batched_tokens)
    return Target(profile, shape, kv_tokens, seqs, tokens), folder


def _write(given: "PlanInput", order: Any, source: Path, target: Path) -> None:
    """Write the planned lines in a new order.

    The file appears when it is whole, and may be read by whoever may read the source.
    """
    import tempfile

    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with source.open("rb") as read, os.fdopen(handle, "wb") as write:
            os.fchmod(handle, os.fstat(read.fileno()).st_mode & 0o777)
            for begin, end in zip(given.begins[order].tolist(), given.ends[order].tolist()):
                read.seek(begin)
                line = read.read(end - begin)
                write.write(line if line.endswith(b"\n") else line + b"\n")
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
