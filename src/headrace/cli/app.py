"""The command line: one Typer app, and the one place where an error becomes a line and an exit code.

Nothing here imports torch or Transformers: commands import what they run when they run.
"""

import sys
from typing import Annotated

import typer

from headrace.cli.batch import batch
from headrace.cli.bench import bench
from headrace.cli.chat import chat
from headrace.cli.help import Command
from headrace.cli.models import models
from headrace.cli.plan import plan
from headrace.cli.serve import serve
from headrace.cli.store import store
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.foreign import way_out
from headrace.core.settings import nearest
from headrace.version import __version__

app = typer.Typer(
    name="headrace",
    help="Serve large language models: online, offline batches and tiered KV storage in one.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error; allowed anywhere")] = False,
) -> None:
    """Serve large language models: online, offline batches and tiered KV storage in one."""


app.command(cls=Command)(serve)
app.command(cls=Command)(chat)
app.command(cls=Command)(plan)
app.add_typer(models, name="models")
app.add_typer(store, name="store")
app.add_typer(batch, name="batch")
app.add_typer(bench, name="bench")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 when it worked, 2 for a wrong command line or setting, 1 for other errors."""
    words = sys.argv[1:] if arguments is None else arguments
    options_end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:options_end]
    words = [word for i, word in enumerate(words) if word != "--debug" or i > options_end]
    try:
        code = app(words, prog_name="headrace", standalone_mode=False)
    except Exception as error:
        if debug:
            raise
        sys.exit(_explain(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> int:
    """Print one line about an error; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        sys.stderr.close()  # whoever read our output has gone: nothing to say, and nobody to say it to
        return 1
    if isinstance(error, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(error, typer.TyperException):
        message = _usage(error)
        if not message:
            return error.exit_code  # a command group without a command: its help is already out
        code = 2
    elif isinstance(error, HeadraceError):
        message, code = str(error), 2 if isinstance(error, ConfigError) else 1
    elif isinstance(error, OSError) and error.strerror:
        message, code = f"{error.strerror}: {error.filename}" if error.filename else error.strerror, 1
    else:
        message, code = f"{type(error).__name__}: {error} (--debug shows where)", 1
    print(f"headrace: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _usage(error: typer.TyperException) -> str:
    """The message of a wrong command line, with the nearest name of an unknown flag or command."""
    context = getattr(error, "ctx", None)
    flag = getattr(error, "option_name", None)
    if context is None:
        return error.format_message()
    if hasattr(error, "possibilities") and flag:
        if foreign := way_out(flag):
            return f"unknown flag {flag}{foreign}"
        known = [name for param in context.command.params for name in (*param.opts, *param.secondary_opts)]
        return f"unknown flag {flag}{nearest(flag, known)}; see {context.command_path} --help"
    message = error.format_message().rstrip(".")
    return f"{message}{' See' if message.endswith('?') else '; see'} {context.command_path} --help"
