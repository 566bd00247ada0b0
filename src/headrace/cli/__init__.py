"""The command line: one Typer app.

May import every room.
"""

from headrace.cli.app import main

__all__ = ["main"]
