"""`headrace models`: the models on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.report import print_json, print_table
from headrace.cli.options import Json

models = typer.Typer(help="List, fetch and remove models.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="'default', a local folder, a .gguf file, or a Hugging Face id")]


@models.command("list")
def list_(json: Json = False) -> None:
    """List the models at hand."""
    from headrace.model.hub import list_models

    entries = list_models()
    if json:
        rows = [{"name": e.name, "path": str(e.path), "bytes": e.bytes, "source": e.source} for e in entries]
        print_json({"models": rows})
    elif not entries:
        print("no models here yet; `headrace models pull` fetches the default one")
    else:
        rows_ = [(e.name, f"{e.bytes / 1e6:,.0f} MB", e.source, str(e.path)) for e in entries]
        print_table("Models", ("name", "size", "source", "folder"), rows_)


@models.command()
def pull(
    name: Name = "default",
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a Hugging Face id")] = None,
    json: Json = False,
) -> None:
    """Fetch a model, and convert it where needed."""
    seconds: dict[str, float] = {}
    folder = fetch(name, revision, seconds)
    if json:
        timing = {f"{phase}_s": round(time, 2) for phase, time in seconds.items()}
        print_json({"name": name, "path": str(folder), **timing})
    else:
        spent = ", ".join(f"{phase} {time:.1f} s" for phase, time in seconds.items())
        print(f"{folder}{f' ({spent})' if spent else ''}")


@models.command("rm")
def rm(name: Name, json: Json = False) -> None:
    """Delete a model from the cache."""
    from headrace.model.hub import remove

    freed = remove(name)
    if json:
        print_json({"name": name, "freed_bytes": freed})
    else:
        print(f"removed {name}, {freed / 1e6:,.0f} MB freed")


@models.command("path")
def path_(name: Name = "default", json: Json = False) -> None:
    """Print the folder of a model that is at hand."""
    from headrace.model.hub import path

    folder = path(name)
    if json:
        print_json({"name": name, "path": str(folder)})
    else:
        print(folder)


def fetch(name: str, revision: str | None = None, seconds: dict[str, float] | None = None) -> Path:
    """The folder of a model, fetched behind a progress bar; `seconds` receives the time of each phase."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    from headrace.model.hub import resolve

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(state: Any) -> None:
            if seconds is not None:
                seconds[state.phase] = state.seconds
            if state.phase not in tasks:
                tasks[state.phase] = bar.add_task(state.phase, total=None)
            bar.update(tasks[state.phase], completed=state.done, total=state.total or None)

        return resolve(name, revision, progress=show)
