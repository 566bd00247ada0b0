"""Where Headrace keeps its files."""

import os
from pathlib import Path


def home() -> Path:
    """`HEADRACE_HOME`, or `headrace` under the user's cache directory. Not created here."""
    explicit = os.environ.get("HEADRACE_HOME")
    if explicit:
        return Path(explicit).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "headrace"
