"""Files that are being written: who writes them shows by a lock, and what dead writers left is removed."""

import contextlib
import errno
import fcntl
import os
import secrets
import time

from headrace.store.tiers.folder import TierFolder

SUFFIX = ".part"
CONTROL_SUFFIX = ".control"
#: Where the file system has no locks, an unfinished file that nobody touched for so long is taken as left behind.
_ABANDONED_SECONDS = 3600.0
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_new(folder: TierFolder, flags: int, name: str | None = None) -> tuple[int, str]:
    """Make a file to write to, locked by this process until the descriptor is closed.

    Args:
        folder: where.
        flags: of `open`, beside those of a new file.
        name: what it is called, without suffix; by default something unique.

    Returns:
        Descriptor and path.

    Raises:
        FileExistsError: a file of that name is being written.
        OSError: it cannot be made.
    """
    while True:
        unique = name or f"{os.getpid()}-{secrets.token_hex(8)}"
        path = folder.temporary(unique + SUFFIX)
        fd = os.open(path, _NEW | flags, 0o600)
        try:
            # Between the two calls a scan may have taken the file for abandoned; then another one is made.
            if lock(fd) and os.fstat(fd).st_nlink:
                return fd, path
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.close(fd)
            raise
        os.close(fd)


def lock(fd: int) -> bool:
    """Lock an open file; False when somebody else has it. Where the file system has no locks, it is true.

    Raises:
        OSError: the file system fails.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def remove_abandoned(folder: TierFolder) -> int:
    """Remove files whose writers are dead, and return how many.

    Raises:
        OSError: they cannot be listed or removed.
    """
    names = folder.temporaries()
    names.sort(key=lambda name: name.endswith(CONTROL_SUFFIX))  # last: they go with their files
    return sum(_remove_if_abandoned(folder, name) for name in names)


def _remove_if_abandoned(folder: TierFolder, name: str) -> bool:
    path = folder.temporary(name)
    try:
        if name.endswith(CONTROL_SUFFIX):
            # Made after the file it belongs to, and removed after it.
            if os.path.exists(folder.temporary(name.removesuffix(CONTROL_SUFFIX) + SUFFIX)):
                return False
            os.unlink(path)
            return True
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not _left_behind(fd):
                return False
            # While the lock is held, nobody else removes the file and makes another under its name.
            os.unlink(path)
            return True
        finally:
            os.close(fd)
    except FileNotFoundError:
        return False  # sealed, aborted or removed by another process meanwhile


def _left_behind(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return time.time() - os.fstat(fd).st_mtime > _ABANDONED_SECONDS
    return os.fstat(fd).st_nlink > 0
