"""How a measurement is told: a table for people, or one JSON object for machines."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def report(title: str, result: Mapping[str, Any], *, as_json: bool, units: Mapping[str, str] | None = None) -> None:
    """Print a flat result: as one line of JSON, or as a table of name and value."""
    if as_json:
        print_json(result)
        return
    rows = [(name, show(value), (units or {}).get(name, "")) for name, value in result.items()]
    print_table(title, ("", "value", ""), rows)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are right-aligned."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_json(result: Mapping[str, Any]) -> None:
    """Print a result as one line, the last of stdout."""
    print(json.dumps(result, ensure_ascii=False), flush=True)


def show(value: Any) -> str:
    """A value as people read it: four significant digits, thousands apart, nested objects as JSON."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
