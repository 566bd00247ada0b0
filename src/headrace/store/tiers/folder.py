"""The private folder of a tier: whose it is, where parts lie in it, and whether it is there at all."""

import contextlib
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.store.layout import ALIGNMENT
from headrace.store.part import PartId

_WRITING = "writing"
_LEAF_HEX = (1, 2)  # 16 x 256 folders: a million parts make 250 names each


class TierFolder:
    """`base`/`below...`: folders of this user alone (0700), made at need, but only while `base` is what it was.

    A base that is missing, or has become another file system (its disk was unmounted), is left alone: nothing is
    written below a bare mount point. Once it is back, everything works as before.

    Args:
        base: a folder that exists; it may belong to somebody else.
        below: names of the folders in it.

    Raises:
        ConfigError: it cannot be made or written, or belongs to another user.
    """

    def __init__(self, base: Path, below: tuple[str, ...]) -> None:
        self._base = base
        self._levels = [base.joinpath(*below[: count + 1]) for count in range(len(below))]
        self.path = self._levels[-1]
        self._root = str(self.path)
        try:
            self._device = os.stat(base).st_dev
            self.ensure()
        except OSError as error:
            raise ConfigError(f"cannot use folder {self.path}: {error.strerror}; give another path") from error

    def ensure(self) -> None:
        """Make what is missing.

        Raises:
            OSError: the base is gone or another file system, or it cannot be made.
        """
        if not self.present and os.stat(self._base).st_dev != self._device:
            raise FileNotFoundError(errno.ENOENT, "its file system is not mounted", str(self._base))
        for level in self._levels:
            _private(level)
        _private(self.path / _WRITING)
        self._device = os.stat(self._base).st_dev

    @property
    def present(self) -> bool:
        """True while it is there: an empty answer then means that a part is not."""
        return os.path.isdir(self._root)

    def file(self, part: PartId) -> str:
        """Where a part lies."""
        key = part.key.hex()
        return f"{self._root}/{key[0]}/{key[1:3]}/{part.name}"

    def make_leaf(self, part: PartId) -> None:
        """Make the folder that a part lies in.

        Raises:
            OSError: it cannot be made.
        """
        self.ensure()
        leaf = Path(self.file(part)).parent
        for folder in (leaf.parent, leaf):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)

    def temporary(self, name: str) -> str:
        """Where a file being written lies."""
        return f"{self._root}/{_WRITING}/{name}"

    def temporaries(self) -> list[str]:
        """Names of all files being written, or left behind.

        Raises:
            OSError: they cannot be listed.
        """
        return sorted(os.listdir(f"{self._root}/{_WRITING}"))

    def parts(self) -> Iterator[tuple[PartId, os.stat_result]]:
        """All sealed parts. What is not a regular file under a part's name in its right place is none.

        Raises:
            OSError: a folder cannot be listed.
        """
        for first in _folders(self._root, _LEAF_HEX[0]):
            for leaf in _folders(first, _LEAF_HEX[1]):
                with os.scandir(leaf) as entries:
                    for entry in entries:
                        part = PartId.parse(entry.name)
                        if part is None or self.file(part) != entry.path:
                            continue
                        try:
                            found = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue  # deleted since it was listed
                        if stat.S_ISREG(found.st_mode):
                            yield part, found

    def takes_direct(self) -> bool:
        """Whether files here can be read and written without the page cache.

        Raises:
            OSError: nothing can be written here at all (a full disk is no error).
        """
        path = self.temporary(f"probe-{os.getpid()}-{secrets.token_hex(8)}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems make the file and then refuse the flag.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return False
        try:
            with mmap.mmap(-1, ALIGNMENT) as page:
                os.pwritev(fd, [page], 0)
                return os.preadv(fd, [page], 0) == ALIGNMENT
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return True
            raise
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):  # another process's scan may have been quicker
                os.unlink(path)


def _private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    # Anybody may have put something here first: /dev/shm is everybody's.
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(folder))
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}", str(folder))
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(folder, 0o700)


def _folders(path: str, hex_digits: int) -> Iterator[str]:
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if len(name) == hex_digits and set(name) <= set("0123456789abcdef") and entry.is_dir(follow_symlinks=False):
                yield entry.path
