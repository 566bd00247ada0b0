"""Who owns a tier: a lock file that the system gives to one process, and the socket at which the owner answers.

For a tier of scope `node` both lie in the tier's folder: whoever uses the folder meets the same owner. A socket
whose path is too long, or whose file system has none, lies in the user's runtime folder; the lock file says where.
For a tier of scope `cluster` both lie in the runtime folder of the node: network file systems may not lock across
nodes, and a socket does not reach another one. Each node then has an owner of its own, which knows of the parts that
its node wrote or a scan found, and keeps the capacity for those.
"""

import fcntl
import hashlib
import json
import os
import socket
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.store.tiers.tier import Tier

#: Longest path of a unix socket, bytes (`sun_path` less the final zero).
MAX_SOCKET_PATH = 107
#: Longest `XDG_RUNTIME_DIR` in which `/headrace/<32 hex digits>.sock` fits.
_MAX_RUNTIME_PATH = MAX_SOCKET_PATH - 47
_BACKLOG = 64
_locks: "weakref.WeakSet[OwnerLock]" = weakref.WeakSet()


@dataclass(frozen=True)
class Place:
    """Where the owner of a tier is found.

    Attributes:
        lock: the lock file.
        sockets: where the socket may lie, best first.
    """

    lock: Path
    sockets: tuple[Path, ...]


def place_of(tier: Tier, lock_dir: Path | None = None) -> Place | None:
    """Where the owner of a tier is found; None for a tier that has no `folder` and so belongs to this process alone.

    Args:
        tier: the tier; a wrapper that passes on the attributes of what it wraps has the same owner.
        lock_dir: use this folder instead of the tier's own; it must exist.

    Raises:
        OSError: the user's runtime folder cannot be used.
    """
    path = lock_dir if lock_dir is not None else getattr(tier, "folder", None)
    if path is None:
        return None
    folder = Path(path).resolve()
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
    runtime = runtime_dir()
    if lock_dir is None and tier.scope == "cluster":
        return Place(runtime / f"{name}.lock", (runtime / f"{name}.sock",))
    return Place(folder / ".lock", (folder / ".socket", runtime / f"{name}.sock"))


def runtime_dir() -> Path:
    """A folder on this node that is the user's alone: in `XDG_RUNTIME_DIR`, else in `/tmp`. Created when missing.

    Raises:
        OSError: it cannot be made, or is somebody else's.
    """
    base = Path(f"/tmp/headrace-{os.getuid()}")
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir() and len(os.fsencode(given)) <= _MAX_RUNTIME_PATH:
        base = Path(given) / "headrace"
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
    found = base.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o170077 != 0o040000:
        raise PermissionError(f"{base} is not a folder of this user alone; remove it or set XDG_RUNTIME_DIR")
    return base


class OwnerLock:
    """The lock of a tier, held. Made by `acquire`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.inherited = os.fstat(descriptor).st_size > 0
        """The last owner did not take leave: others may be writing what it granted."""
        _locks.add(self)

    @classmethod
    def acquire(cls, path: Path) -> "OwnerLock | None":
        """Take the lock; None while another process (or another catalog of this one) has it.

        Raises:
            OSError: the file cannot be made.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        lock = None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, descriptor):  # else somebody has removed it in between, and the lock of that file is nobody's
                lock = cls(path, descriptor)
        except BlockingIOError:
            pass
        finally:
            if lock is None:
                os.close(descriptor)
        return lock

    @property
    def ours(self) -> bool:
        """False once the lock file was removed or replaced: somebody else may own the tier now."""
        return self._descriptor >= 0 and _is(self._path, self._descriptor)

    def announce(self, address: Path) -> None:
        """Say where the owner answers."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "socket": str(address)}).encode(), 0)

    def release(self, *, clean: bool) -> None:
        """Give the lock up. `clean`: nobody writes what this owner granted."""
        if self._descriptor < 0:
            return
        if clean:
            os.ftruncate(self._descriptor, 0)
        self.forget()

    def forget(self) -> None:
        """Close the lock file; in a forked child that leaves the parent's lock alone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def owner_address(place: Place) -> Path | None:
    """Where the owner answers; None while it has not said so.

    Raises:
        OSError: the lock file cannot be read.
    """
    try:
        said = json.loads(place.lock.read_bytes() or b"{}")
    except ValueError:  # just being written
        return None
    address = said.get("socket") if isinstance(said, dict) else None
    return Path(address) if isinstance(address, str) else None


def listen(place: Place) -> tuple[socket.socket, Path]:
    """Open the owner's socket; call it with the lock held, for it takes the place of a dead owner's.

    Raises:
        OSError: no place will do.
    """
    problem: OSError | None = None
    for path in place.sockets:
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            continue
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            problem = error
        else:
            return listener, path
    raise problem or OSError(f"no path short enough for a socket among {', '.join(map(str, place.sockets))}")


def _is(path: Path, descriptor: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:  # removed, or its file system is gone
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _forget_in_child() -> None:
    """A forked child must not keep the lock when its parent is killed."""
    for lock in list(_locks):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)
