"""Commands whose options are generated from the configuration tree."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.core.config import Config
from headrace.core.errors import ConfigError
from headrace.core.settings import Setting, resolve, settings_of

_PANELS = {
    "model": "Model", "cache": "KV cache", "scheduler": "Scheduler", "store": "KV store", "server": "Server",
}  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]


def with_settings(tree: type, *, positional: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every leaf of a configuration tree, `--config FILE` and a positional MODEL.

    Commands with arguments of their own do without the latter (`positional=False`).

    The command's first parameter receives the resolved tree; its other parameters are options of its own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        settings = settings_of(tree)
        own = list(inspect.signature(command).parameters.values())[1:]

        def run(**values: Any) -> None:
            flags = {setting.name: values.pop(setting.name) for setting in settings}
            model = values.pop("positional_model", None)
            if model is not None:
                if flags["model"] not in (None, model):
                    raise ConfigError(f"two models given: {model} and --model {flags['model']}; give one")
                flags["model"] = model
            config: Any = resolve(tree, flags, root=Config, file=values.pop("config"))
            command(config, **values)

        parameters = [
            *([_positional()] if positional else []),
            _config_file(),
            *(_parameter(setting) for setting in settings),
            *own,
        ]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        run.__annotations__ = {}  # Typer reads the signature; the `Any` of **values would win over it
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _positional() -> inspect.Parameter:
    annotation = Annotated[str | None, typer.Argument(metavar="MODEL", help="the same as --model", show_default=False)]
    return _keyword("positional_model", annotation)


def _config_file() -> inspect.Parameter:
    help = "TOML file of settings; flags and HEADRACE_* variables win over it"
    return _keyword("config", Annotated[Path | None, typer.Option("--config", metavar="FILE", help=help)])


def _parameter(setting: Setting) -> inspect.Parameter:
    default = "" if setting.default in (None, "", ()) else f"default: {setting.show(setting.default)}, "
    text = f"{setting.help} ({default}env: {setting.env})"
    panel = next((_PANELS[name] for name in reversed(setting.path[:-1]) if name in _PANELS), None)
    if setting.kind is bool:
        names = f"{setting.flag}/{setting.flag.replace('--', '--no-', 1)}"
        option = typer.Option(names, help=text, rich_help_panel=panel, show_default=False)
        return _keyword(setting.name, Annotated[bool | None, option])
    option = typer.Option(setting.flag, metavar=_metavar(setting), help=text, rich_help_panel=panel)
    if setting.repeatable:
        return _keyword(setting.name, Annotated[list[str] | None, option])
    return _keyword(setting.name, Annotated[str | None, option])


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "|".join(str(choice) for choice in setting.choices)
    if setting.unit:
        return {"bytes": "SIZE", "seconds": "DURATION"}[setting.unit]
    return "TIER" if setting.repeatable else {int: "INT", float: "FLOAT", str: "TEXT"}[setting.kind]


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
