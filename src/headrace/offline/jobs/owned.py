"""Result files belong to one job: it makes them itself, knows them again, and never writes into another's.

Every line of a result begins with the id of its job, so a file with content says whose it is, also after it was moved
or the machine was started anew. An empty one is known by its inode, which is noted when the job is created.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.output import line_head
from headrace.offline.jobs.spec import Inode, JobSpec, JobState

MODE = 0o644


def claim_files(spec: JobSpec, state: JobState) -> None:
    """Make both files of a new job, and note in its state which they are: both, or none.

    Raises:
        JobError: one exists, or cannot be made.
    """
    state.output_inode = _made(spec.output)
    try:
        state.error_inode = _made(spec.errors)
    except BaseException:
        os.unlink(spec.output)
        raise


def discard_files(spec: JobSpec) -> None:
    """Delete the files of a job that has written nothing; whatever has content stays."""
    for path in (Path(spec.output), Path(spec.errors)):
        with suppress(FileNotFoundError):
            if not path.stat().st_size:
                path.unlink()


def open_owned(path: str, job: str, length: int, inode: Inode | None) -> int:
    """Open a job's file to write, and keep other processes from doing so; it is made anew where nothing was written.

    Args:
        path: of the file.
        job: its id.
        length: bytes that the journal says it has at least.
        inode: of the file when the job made it; None: not noted.

    Returns:
        A descriptor.

    Raises:
        JobError: it is not this job's, it is shorter, or it cannot be opened.
    """
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if length:
                raise
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
            inode = inode_of(descriptor)
    except OSError as error:
        raise JobError(f"job {job} cannot write {path}: {error.strerror}") from error
    try:
        _check(descriptor, path, job, length, inode)
        _lock(descriptor, path, job)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def inode_of(descriptor: int) -> Inode:
    """Device and inode of an open file."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _check(descriptor: int, path: str, job: str, length: int, inode: Inode | None) -> None:
    size = os.fstat(descriptor).st_size
    head = line_head(job)
    # A machine that lost its power may leave zeros where the first write was under way.
    begin = os.pread(descriptor, len(head), 0).rstrip(b"\x00")
    known = begin == head or inode is None or inode_of(descriptor) == inode
    if not head.startswith(begin) or not known:
        raise JobError(f"{path} exists and is not of job {job}; move it away, then go on")
    if size < length:
        raise JobError(f"{path} has {size} bytes, the job's journal says {length}: it was changed; run the job anew")


def _lock(descriptor: int, path: str, job: str) -> None:
    """For the case that an inode is used again: two jobs may take the same empty file for theirs."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JobError(f"{path} is written by another job than {job}; wait for it, or move the file away") from None
    except OSError:
        return  # a file system without locks; the checks above do not need them


def _made(path: str) -> Inode:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    except FileExistsError:
        raise JobError(f"{path} exists; choose another") from None
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}; choose another path") from error
    try:
        return inode_of(descriptor)
    finally:
        os.close(descriptor)
