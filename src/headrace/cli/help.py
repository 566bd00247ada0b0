"""The help of a command as plain text in sections, wrapped to the terminal and never cut."""

from typing import Any

import typer.core


class Command(typer.core.TyperCommand):
    """A command whose options stand under the headings that they name as `rich_help_panel`.

    Typer's own tables give every kind of name a column and cut what does not fit; flags and variables are there to be
    copied, so they must stay whole at 80 columns and in a pipe.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, one section per heading, those without a heading first."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                plain = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or plain, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
