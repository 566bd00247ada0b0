"""Runs the command line as a user does: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def environment(home: Path, **extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    return {**clean, "HEADRACE_HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **extra}


def headrace(*words: str, home: Path, stdin: str = "", **extra: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", *words],
        input=stdin, capture_output=True, text=True, env=environment(home, **extra), timeout=120, check=False,
    )  # fmt: skip
