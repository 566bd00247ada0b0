"""Folders that appear whole or not at all, made once however many processes ask for them."""

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.core.errors import ModelError

MANIFEST = "headrace.json"


@contextmanager
def exclusive(models: Path, name: str) -> Iterator[int]:
    """Hold the lock of the folder `name` under `models`; waits for another holder.

    Yields the lock's file descriptor: a child process that inherits it keeps the lock until it ends, also when this
    process is killed first, so nobody takes a folder it still writes for a leftover.

    Raises:
        ModelError: the folder of models cannot be written.
    """
    try:
        (models / ".locks").mkdir(parents=True, exist_ok=True)
        descriptor = os.open(models / ".locks" / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ModelError(f"cannot write to {models} ({error.strerror}); set HEADRACE_HOME to another folder") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def staging(models: Path, name: str) -> Iterator[Path]:
    """A fresh folder on the same file system as `models/name`; removed at the end if it was not published.

    The caller holds the lock of `name`, so whatever staging folders of that name exist were left by killed processes;
    they are removed first.
    """
    staged = models / ".staging"
    staged.mkdir(parents=True, exist_ok=True)
    for leftover in staged.glob(f"{name}@*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = staged / f"{name}@{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, target: Path, facts: dict[str, Any]) -> None:
    """Write the manifest into `folder` and move it to `target`, replacing what is there.

    The manifest holds `facts` and the size of every file, by which `complete` recognises the folder later. Everything
    is on the disk before the rename, so a crash leaves no half folder under the final name.
    """
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / MANIFEST).write_text(json.dumps({**facts, "files": files}, indent=1) + "\n")
    for path in [*folder.rglob("*"), folder]:
        _sync(path)
    if target.exists():
        doomed = folder.with_name(folder.name + ".old")
        target.rename(doomed)
        folder.rename(target)
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        folder.rename(target)
    _sync(target.parent)


def complete(target: Path, facts: dict[str, Any]) -> bool:
    """True when `target` was published with these `facts` and every file still has its size."""
    manifest = read_manifest(target)
    if manifest is None or any(manifest.get(key) != value for key, value in facts.items()):
        return False
    try:
        return all((target / name).stat().st_size == size for name, size in manifest["files"].items())
    except OSError:
        return False


def read_manifest(target: Path) -> dict[str, Any] | None:
    """The manifest of a published folder; None where there is none or it cannot be read as one."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
