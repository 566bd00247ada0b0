"""A quota of processor time for a process that runs: how a worker is made slow on purpose."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.core.errors import ConfigError

ROOT = Path("/sys/fs/cgroup")
#: Short, so that a step of tens of milliseconds is slowed evenly.
PERIOD_US = 10_000


@contextmanager
def cpu_quota(pid: int, share: float, root: Path = ROOT) -> Iterator[None]:
    """Let all threads of a process together have a share of one core; afterwards it has what it had.

    Args:
        pid: of the process.
        share: of one core, more than 0.
        root: where control groups are mounted, version 1 or 2.

    Raises:
        ConfigError: this user may not make control groups with a quota here.
    """
    one = (root / "cpu").is_dir()
    folder = (root / "cpu" if one else root) / f"headrace-quota-{os.getpid()}"
    quota = int(share * PERIOD_US)
    limits = (
        {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
        if one
        else {"cpu.max": f"{quota} {PERIOD_US}"}
    )
    before = _group_of(pid, one)
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / name).write_text(value)
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        raise ConfigError(f"no CPU quota can be set in {folder.parent}: {error.strerror}; run it as root") from error
    try:
        yield
    finally:
        if Path(f"/proc/{pid}").is_dir():
            (folder.parent / before / "cgroup.procs").write_text(str(pid))
        folder.rmdir()


def _group_of(pid: int, one: bool) -> str:
    """The group of a process, relative to the mount: lines of its file are `number:controllers:/path`."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if ("cpu" in controllers.split(",")) if one else number == "0":
            return path.lstrip("/")
    return ""
