"""`headrace batch`: run a file of requests, and look after such jobs."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headrace.bench.report import print_json, report
from headrace.cli.help import Command
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.cli.batch_run import Outcome
    from headrace.offline.jobs.folder import JobFolder
    from headrace.offline.jobs.spec import JobSpec, JobState

batch = typer.Typer(
    help="Run files of requests (OpenAI's batch format), each answered exactly once.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

JobId = Annotated[
    str, typer.Argument(metavar="JOB", help="id of a job, as `headrace batch ls` shows it, or its beginning")
]
INTERRUPTED = 130
#: A job of more requests is drawn without what was planned: the simulator would take minutes.
MOST_SIMULATED = 50_000
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="draw compute and memory time of the steps beside the plan's")
]


@batch.command(cls=Command)
@with_settings(EngineConfig, positional=False)
def run(
    config: EngineConfig,
    input: Annotated[Path, typer.Argument(metavar="INPUT", help="JSONL file of requests")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="where the answers go")],
    errors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="where errors go; default: beside the output")
    ] = None,
    order: Annotated[
        str, typer.Option(metavar="ORDER", help="in which requests run: blend, dfs, balance, random, fcfs")
    ] = "blend",
    dp: Annotated[
        int, typer.Option(min=1, metavar="N", help="engines that share the job, each on its part of the machine")
    ] = 1,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Answer every request of a file, also across crashes: what is done is kept, the rest is resumed."""
    from headrace.bench import plot as drawing
    from headrace.offline.jobs.errors import JobError
    from headrace.offline.jobs.folder import create_job
    from headrace.offline.jobs.lines import check_file
    from headrace.offline.jobs.spec import JobSpec, new_job_id
    from headrace.offline.planning.admission import check_order

    check_order(order)
    check_file(input)
    _check_free(output, "--output", input)
    errors = errors or output.with_name(f"{output.stem}.errors{output.suffix}")
    _check_free(errors, "--errors", input)
    drawing.check(plot, input, output, errors)
    if os.path.realpath(errors) == os.path.realpath(output):
        raise ConfigError("--output and --errors name the same file; give two")
    spec = JobSpec(
        id=new_job_id(),
        origin="cli",
        created_at=time.time(),
        input=str(input.absolute()),
        output=str(output.absolute()),
        errors=str(errors.absolute()),
        order=order,
        config=msgspec.to_builtins(config),
        workers=dp,
    )
    folder = create_job(spec)
    begun = folder.state()
    try:
        _run(folder, config, dp, json, plot)
    except JobError:
        raise
    except HeadraceError:  # e.g. no such model: so that the same command, put right, finds its paths free
        if folder.state() == begun:
            folder.discard(spec)
        raise


@batch.command()
def resume(
    job: JobId,
    dp: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="engines that share the rest; default: as many as it was begun with"),
    ] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Go on with a job that was interrupted or killed; it runs with the settings it was begun with."""
    from headrace.bench import plot as drawing
    from headrace.offline.jobs.errors import JobError
    from headrace.offline.jobs.folder import find_job

    folder = find_job(job)
    journal = folder.journal()
    spec, state = journal.spec, journal.state
    journal.close()
    drawing.check(plot, *(Path(name) for name in (spec.input, spec.output, spec.errors)))
    if spec.origin == "server":
        raise JobError(f"job {folder.id} belongs to a server; it goes on when `headrace serve` runs with its model")
    if state.final:
        raise JobError(f"job {folder.id} is {state.status}; there is nothing to resume")
    _run(folder, msgspec.convert(spec.config, EngineConfig), dp or spec.workers, json, plot)


@batch.command()
def status(job: JobId, json: Json = False) -> None:
    """How far a job is."""
    from headrace.offline.jobs.folder import find_job

    _report("Job", _described(find_job(job)), json)


@batch.command()
def cancel(job: JobId) -> None:
    """End a job; its finished results are kept, the rest is written to its errors.

    That of a server is ended by a server, so that its results become files there.
    """
    import asyncio

    from headrace.offline.jobs.cancel import cancel_job
    from headrace.offline.jobs.errors import JobError
    from headrace.offline.jobs.folder import find_job

    folder = find_job(job)
    state = asyncio.run(cancel_job(folder))
    if state.status not in ("cancelled", "cancelling"):
        raise JobError(f"job {folder.id} is {state.status} already")
    by_server = state.status == "cancelling" and folder.spec().origin == "server"
    print(f"{folder.id}: {state.status}{'; a server ends it, now or when one runs again' if by_server else ''}")


@batch.command()
def ls(json: Json = False) -> None:
    """List all jobs, the newest first."""
    from headrace.offline.jobs.errors import JobError
    from headrace.offline.jobs.folder import list_jobs

    rows: list[dict[str, Any]] = []
    for folder in list_jobs():
        try:
            rows.append(_described(folder))
        except JobError as error:
            print(f"headrace: job {folder.id} is left out: {error}", file=sys.stderr)
    rows.sort(key=lambda row: row["created_at"], reverse=True)
    if json:
        print_json({"jobs": rows})
        return
    if not rows:
        print("no jobs")
    for row in rows:  # plain lines: an id is there to be copied
        created = _date(row["created_at"], "%Y-%m-%d %H:%M")
        counts = f"{row['completed']:,} answered, {row['failed']:,} errors of {row['total']:,}"
        print(f"{row['id']}  {created}  {row['status']:<12} {counts}  {row['input']}")


def _check_free(path: Path, flag: str, input: Path) -> None:
    """Never write over anything."""
    if path.is_dir():
        raise ConfigError(f"{flag} names the folder {path}; give a file")
    if os.path.lexists(path):
        raise ConfigError(f"{flag}: {path} exists; {_made_by(path)}choose another")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {path.absolute().parent}")


def _made_by(path: Path) -> str:
    from headrace.offline.jobs.folder import job_of

    made = job_of(path)
    if made is None:
        return ""
    spec, state = made
    what = "output" if os.path.realpath(path) == os.path.realpath(spec.output) else "errors"
    if state.final:
        return f"it is the {what} of job {spec.id}, which is {state.status}; "
    return f"it is the {what} of job {spec.id}, `headrace batch resume {spec.id}` goes on; or "


def _run(folder: "JobFolder", config: EngineConfig, workers: int, json: bool, plot: Path | None = None) -> None:
    import asyncio

    from headrace.cli.batch_run import run_job

    outcome = asyncio.run(run_job(folder, config, workers))
    state, progress = outcome.state, outcome.progress
    if plot is not None and outcome.requests is not None:
        _draw(folder, outcome, workers, plot)
    if state is None:
        print(f"interrupted; `headrace batch resume {folder.id}` goes on", flush=True)
        raise typer.Exit(INTERRUPTED)
    result = {**_described(folder), "tokens_per_s": progress.tokens_per_s if progress else 0.0}
    if progress is not None and progress.share_of_optimum is not None:
        result["share_of_optimum"] = progress.share_of_optimum
    _report("Batch", result, json)
    if state.failed:
        print(f"headrace: {state.failed:,} of {state.total:,} lines failed; see {result['errors']}", file=sys.stderr)
    if state.status != "completed" or not state.completed:
        raise typer.Exit(1)


def _draw(folder: "JobFolder", outcome: "Outcome", workers: int, path: Path) -> None:
    """Draw what the steps were made of, and for one engine what the same job takes in the simulator."""
    import numpy as np

    from headrace.bench import plot as drawing
    from headrace.offline.jobs.step_record import read_record
    from headrace.offline.plan_report import make_plan

    planned = None
    requests, target = outcome.requests, outcome.target
    if workers == 1 and requests is not None and target is not None and 0 < len(requests) <= MOST_SIMULATED:
        order = folder.spec().order
        lengths = np.maximum(outcome.lengths, 1).astype(np.int64)
        planned = make_plan(requests, lengths, target, [order]).runs[order]
    drawing.measured(read_record(folder.steps), planned, path)


def _report(title: str, shown: dict[str, Any], json: bool) -> None:
    report(title, shown if json else {**shown, "created_at": _date(shown["created_at"])}, as_json=json)


def _date(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    return time.strftime(form, time.localtime(seconds))


def _described(folder: "JobFolder") -> dict[str, Any]:
    """A job for people and for `--json`."""
    journal = folder.journal()
    try:
        spec, state, cancel_wanted = journal.spec, journal.state, journal.cancel_wanted
    finally:
        journal.close()
    if cancel_wanted and not state.final:
        state.status = "cancelling"
    return describe(spec, state, running=not state.final and folder.running)


def describe(spec: "JobSpec", state: "JobState", running: bool) -> dict[str, Any]:
    """What a job is and how far it is; one that nobody runs is `interrupted`."""
    status = state.status if state.final or running or spec.origin == "server" else "interrupted"
    shown: dict[str, Any] = {
        "id": spec.id,
        "status": status,
        "total": state.total,
        "completed": state.completed,
        "failed": state.failed,
        "prompt_tokens": state.prompt_tokens,
        "cached_tokens": state.cached_tokens,
        "output_tokens": state.output_tokens,
        "seconds": round(state.seconds, 3),
        "order": spec.order,
        "input": spec.input,
        "output": spec.output,
        "errors": spec.errors,
        "created_at": spec.created_at,
    }
    if state.reason:
        shown["reason"] = state.reason
    return shown
