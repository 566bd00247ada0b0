"""From the configuration tree to flags, `HEADRACE_*` variables and TOML keys, and back.

A leaf field `max_model_len` of the tree is the flag `--max-model-len`, the variable `HEADRACE_MAX_MODEL_LEN` and the
key `max_model_len` of a file. A flag beats the environment, which beats the file, which beats the default. What no
field answers to is an error that suggests the nearest name.
"""

import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import ConfigError
from headrace.core.foreign import way_out

ENV_PREFIX = "HEADRACE_"
# Read elsewhere (`core.paths`), before there is a configuration.
ENV_OTHERS = frozenset({"HEADRACE_HOME"})

T = TypeVar("T")

_SIZE_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3}
_SIZE_UNITS |= {"t": 1000**4, "tb": 1000**4, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_TIME_UNITS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def parse_size(text: str) -> int:
    """Bytes of `4096`, `512MB`, `2GiB`. Raises `ValueError`."""
    number, unit = _quantity(text)
    if unit.lower() not in _SIZE_UNITS:
        raise ValueError(f"unknown unit {unit!r}; a size is a number with B, KB, MB, GB, KiB, MiB or GiB")
    return int(number * _SIZE_UNITS[unit.lower()])


def parse_duration(text: str) -> float:
    """Seconds of `150ms`, `2m`, `0`: only nothing needs no unit. Raises `ValueError`."""
    number, unit = _quantity(text)
    if not unit and number:
        raise ValueError(_no_unit(number))
    if unit.lower() not in _TIME_UNITS:
        raise ValueError(f"unknown unit {unit!r}; a duration is a number with us, ms, s, m, h or d")
    return number * _TIME_UNITS[unit.lower()]


def _no_unit(number: float) -> str:
    return f"{number:g} has no unit; write {number:g}ms or {number:g}s"


def _quantity(text: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError("not a number with a unit")
    return float(match[1]), match[2]


def format_size(count: int) -> str:
    """Bytes in the largest binary unit that divides them: what `parse_size` reads back."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def format_duration(seconds: float) -> str:
    """Seconds as `parse_duration` reads them back."""
    return f"{seconds * 1000:g}ms" if 0 < seconds < 1 else f"{seconds:g}s"


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """` (did you mean X?)` for the most similar known name, shown after `prefix`; or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


@dataclass(frozen=True)
class Setting:
    """One leaf of the configuration tree.

    Attributes:
        path: names from the root of the tree, e.g. `("engine", "cache", "kv_memory")`.
        kind: type of the value: str, int, float or bool.
        optional: whether None is a value (the default, then).
        default: the value without any source.
        help: one line.
        choices: the values allowed; empty: any.
        unit: `bytes` or `seconds` where values may carry a unit.
        flag: the command line's name of it.
        repeatable: the value is a tuple; the flag may be given several times, a variable separates its members by
            commas or white space, a file has a list.
    """

    path: tuple[str, ...]
    kind: type
    optional: bool
    default: Any
    help: str
    choices: tuple[Any, ...]
    unit: str
    flag: str
    repeatable: bool = False

    @property
    def name(self) -> str:
        """The field's name; unique in the tree."""
        return self.path[-1]

    @property
    def env(self) -> str:
        """The environment's name of it."""
        return ENV_PREFIX + self.name.upper()

    def show(self, value: Any) -> str:
        """A value as text that `parse` reads back."""
        if value is None:
            return ""
        if self.repeatable:
            return ",".join(value)
        if self.kind is bool:
            return "true" if value else "false"
        if self.unit == "bytes":
            return format_size(value)
        return format_duration(value) if self.unit == "seconds" else str(value)

    def parse(self, text: str, source: str) -> Any:
        """The value that a flag or variable spells.

        Args:
            text: e.g. `2GiB`.
            source: what to call it in the message, e.g. `--kv-memory`.

        Raises:
            ConfigError: the text is not a value of this setting.
        """
        if self.repeatable:
            return tuple(re.split(r"[,\s]+", text.strip(", \t\n"))) if text.strip(", \t\n") else ()
        try:
            value = self._convert(text)
        except ValueError as error:
            why = "" if self.kind in (int, float) and not self.unit else f" ({error})"
            raise ConfigError(f"{source}: {text!r} is not {self._expected()}{why}") from None
        return self._checked(value, source)

    def accept(self, value: Any, source: str) -> Any:
        """The value of an already typed source, such as TOML; text is parsed where the setting has a unit.

        Raises:
            ConfigError: the value is of another type or not allowed.
        """
        if self.repeatable and isinstance(value, list | tuple):
            if not all(isinstance(member, str) and member for member in value):
                raise ConfigError(f"{source}: {value!r} is not a list of texts")
            return tuple(value)
        if isinstance(value, str) and (self.kind is str or self.unit):
            return self.parse(value, source)
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if self.repeatable or not isinstance(value, self.kind) or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigError(f"{source}: {value!r} is not {self._expected()}")
        return self._checked(value, source)

    def _convert(self, text: str) -> Any:
        if self.unit == "bytes":
            return parse_size(text)
        if self.unit == "seconds":
            return parse_duration(text)
        if self.kind is bool:
            word = text.strip().lower()
            if word not in _TRUE | _FALSE:
                raise ValueError("true or false")
            return word in _TRUE
        if self.kind is int:
            return int(text.strip())
        if self.kind is float:
            return float(text)
        return text

    def _checked(self, value: Any, source: str) -> Any:
        if self.choices and value not in self.choices:
            choices = ", ".join(str(choice) for choice in self.choices)
            raise ConfigError(f"{source}: {value!r} is not one of {choices}")
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{source}: {value} must be a finite number of at least 0")
        if isinstance(value, str) and not value and not self.optional and self.default:
            raise ConfigError(f"{source}: must not be empty")
        return value

    def _expected(self) -> str:
        if self.unit:
            return {"bytes": "a size such as 2GiB", "seconds": "a duration such as 150ms"}[self.unit]
        if self.repeatable:
            return "a list of texts"
        return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[self.kind]


def settings_of(tree: type) -> tuple[Setting, ...]:
    """The leaves of a tree of dataclasses, in order.

    Raises:
        TypeError: a leaf's type is not supported, or two leaves have the same name (a fault of the tree).
    """
    found = tuple(_walk(tree, ()))
    names = [setting.name for setting in found]
    for name in names:
        if names.count(name) > 1:
            raise TypeError(f"two fields of {tree.__name__} are called {name}; flags need unique names")
    return found


def _walk(tree: type, prefix: tuple[str, ...]) -> Iterator[Setting]:
    hints = typing.get_type_hints(tree)
    for item in dataclasses.fields(tree):
        hint = hints[item.name]
        path = (*prefix, item.name)
        if dataclasses.is_dataclass(hint):
            yield from _walk(typing.cast(type, hint), path)
            continue
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        repeatable = hint == tuple[str, ...]
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] if union else [hint]
        kinds = [str] if repeatable else kinds
        if len(kinds) != 1 or kinds[0] not in (str, int, float, bool):
            raise TypeError(
                f"field {'.'.join(path)} has type {hint}; flags can be str, int, float, bool or tuple[str, ...]"
            )
        unit = next((unit for unit in ("bytes", "seconds") if item.metadata.get(unit)), "")
        yield Setting(
            path=path,
            kind=kinds[0],
            optional=union,
            default=item.default,
            help=item.metadata["help"],
            choices=tuple(item.metadata.get("choices", ())),
            unit=unit,
            flag=item.metadata.get("flag", "--" + item.name.replace("_", "-")),
            repeatable=repeatable,
        )


def to_flags(config: Any) -> list[str]:
    """The command line that makes this configuration: a flag for each value that is not the default."""
    arguments: list[str] = []
    for setting in settings_of(type(config)):
        value = config
        for name in setting.path:
            value = getattr(value, name)
        if value == setting.default:
            continue
        if setting.kind is bool:
            arguments.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        elif setting.repeatable:
            arguments += [word for member in value for word in (setting.flag, member)]
        else:
            arguments += [setting.flag, setting.show(value)]
    return arguments


def read_environment(tree: type, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Values of all `HEADRACE_*` variables, by field name; an empty variable counts as unset.

    Raises:
        ConfigError: a variable with that prefix names no field, or its value is wrong.
    """
    environ = os.environ if environ is None else environ
    known = {setting.env: setting for setting in settings_of(tree)}
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in ENV_OTHERS:
            continue
        if variable not in known:
            # Without the prefix that all share, which would make any two of them look alike.
            names = {known_name.removeprefix(ENV_PREFIX) for known_name in (*known, *ENV_OTHERS)}
            foreign = way_out(variable.removeprefix(ENV_PREFIX))
            hint = foreign or nearest(variable.removeprefix(ENV_PREFIX), names, ENV_PREFIX)
            raise ConfigError(f"unknown environment variable {variable}{hint}")
        if text:
            values[known[variable].name] = known[variable].parse(text, variable)
    return values


def read_file(tree: type, path: Path) -> dict[str, Any]:
    """Values of a TOML file, by field name.

    Keys are field names, with underscores or dashes, at the top or in tables named as the tree's branches
    (`[engine.cache]`).

    Raises:
        ConfigError: the file cannot be read, a key names no field, or a value is wrong.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from error
    values: dict[str, Any] = {}
    _read_table(document, (), settings_of(tree), path, values)
    return values


def _read_table(
    table: Mapping[str, Any], prefix: tuple[str, ...], settings: tuple[Setting, ...], path: Path, into: dict[str, Any]
) -> None:
    branches = {s.path[: len(prefix) + 1] for s in settings if s.path[: len(prefix)] == prefix and len(s.path) > 1}
    leaves = {s.name: s for s in settings if not prefix or s.path[:-1] == prefix}
    for key, value in table.items():
        name = key.replace("-", "_")
        where = ".".join((*prefix, name))
        if isinstance(value, dict) and (*prefix, name) in branches and name not in leaves:
            _read_table(value, (*prefix, name), settings, path, into)
            continue
        if name not in leaves:
            known = [*leaves, *(branch[-1] for branch in branches)]
            raise ConfigError(f"unknown key {where!r} in {path}{way_out(name) or nearest(name, known)}")
        if name in into:
            raise ConfigError(f"key {name!r} stands twice in {path}; keep one")
        source = f"key {where!r} in {path}"
        into[name] = leaves[name].accept(value, source)
        if leaves[name].unit == "seconds" and into[name] and not isinstance(value, str):
            raise ConfigError(f"{source}: {_no_unit(into[name])}")


def build(tree: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the tree with these values (by field name) in place of defaults; other names are ignored."""
    hints = typing.get_type_hints(tree)
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(tree):  # type: ignore[arg-type]
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            arguments[item.name] = build(typing.cast(type, hint), values)
        elif item.name in values:
            arguments[item.name] = values[item.name]
    return tree(**arguments)


def resolve(
    tree: type[T],
    flags: Mapping[str, str | bool | list[str] | None],
    *,
    root: type | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """The configuration from all sources.

    Args:
        tree: what to build.
        flags: text of each flag given (or a bool, or the texts of one that repeats), by field name; None: not given.
        root: the whole tree of which `tree` is a part, so that variables and file keys of the other parts are checked
            and passed over rather than refused; default: `tree`.
        file: a TOML file.
        environ: in place of the process's environment.

    Raises:
        ConfigError: a name is unknown or a value wrong.
    """
    whole = root or tree
    by_name = {setting.name: setting for setting in settings_of(tree)}
    values = read_file(whole, file) if file else {}
    values |= read_environment(whole, environ)
    for name, text in flags.items():
        if text is None or text == []:
            continue
        setting = by_name[name]
        typed = isinstance(text, bool | list)
        values[name] = setting.accept(text, setting.flag) if typed else setting.parse(str(text), setting.flag)
    return build(tree, values)
