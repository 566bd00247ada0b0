"""A `HEADRACE_HOME` of a test's own."""

from pathlib import Path

from headrace.core import paths


def fresh_home(folder: Path) -> Path:
    """An empty one; what this machine has compiled already need not be compiled again.

    Args:
        folder: where; made if it is not there.
    """
    kernels = paths.home() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    (folder / "kernels").symlink_to(kernels)
    return folder
