"""Writing one part to a file: unseen until it is complete."""

import contextlib
import errno
import os
import threading
from types import TracebackType

from headrace.store.layout import ALIGNMENT
from headrace.store.part import PartId
from headrace.store.tiers.folder import TierFolder
from headrace.store.tiers.os_errors import tier_error
from headrace.store.tiers.temporary import open_new
from headrace.store.tiers.tier import TierError


class FilePartWriter:
    """A `PartWriter` over a temporary file that `seal` renames into place.

    Nothing is flushed to the device: after a power loss a part may be there in name only, which its checksums show.

    Args:
        tier: the tier's name.
        folder: where parts lie.
        part: what is written.
        nbytes: its size; the room is taken at once, so that a full disk shows here.
        direct: write past the page cache.
        forget: where that cannot be, take what was written out of the page cache again at the end.
        name: of the temporary file, by default something unique.

    Raises:
        TierFull: no room.
        TierError: it cannot be begun.
    """

    def __init__(
        self,
        tier: str,
        folder: TierFolder,
        part: PartId,
        nbytes: int,
        *,
        direct: bool,
        forget: bool,
        name: str | None = None,
    ) -> None:
        self.part = part
        self.nbytes = nbytes
        self._tier = tier
        self._folder = folder
        self._forget = forget and not direct
        self._lock = threading.Lock()
        self._written = 0
        flags = os.O_DIRECT if direct else 0
        try:
            try:
                self._fd, self._path = open_new(folder, flags, name)
            except FileNotFoundError:
                folder.ensure()
                self._fd, self._path = open_new(folder, flags, name)
        except OSError as error:
            raise tier_error(tier, f"beginning {part.name}", error) from error
        self._open = True
        try:
            _take_room(self._fd, nbytes)
        except OSError as error:
            self.abort()
            raise tier_error(tier, f"taking room for {part.name}", error) from error

    def put(self, offset: int, data: memoryview) -> None:
        """See `PartWriter.put`."""
        if offset % ALIGNMENT or len(data) % ALIGNMENT or offset + len(data) > self.nbytes:
            raise TierError(
                f"tier {self._tier}: {len(data)} bytes at {offset} are not aligned or exceed the {self.nbytes} bytes "
                f"of {self.part.name}"
            )
        with self._lock:
            if not self._open:
                raise TierError(f"tier {self._tier}: {self.part.name} is sealed or aborted; nothing can be put")
            done = 0
            try:
                while done < len(data):
                    done += os.pwritev(self._fd, [data[done:]], offset + done)
            except OSError as error:
                raise tier_error(self._tier, f"writing {self.part.name}", error) from error
            self._written += len(data)

    def seal(self) -> None:
        """See `PartWriter.seal`; a part of which something was never put is not published."""
        with self._lock:
            if not self._open:
                raise TierError(f"tier {self._tier}: {self.part.name} is sealed or aborted already")
            try:
                if self._written < self.nbytes:
                    missing = self.nbytes - self._written
                    raise TierError(f"tier {self._tier}: {self.part.name} lacks {missing} bytes; not published")
                if self._forget:
                    os.fdatasync(self._fd)  # only clean pages can be forgotten
                    os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._publish()
            except OSError as error:
                self._remove()
                raise tier_error(self._tier, f"publishing {self.part.name}", error) from error
            except TierError:
                self._remove()
                raise
            self._close()

    def abort(self) -> None:
        """See `PartWriter.abort`. Waits for a `put` under way."""
        with self._lock:
            if self._open:
                self._remove()

    def __enter__(self) -> "FilePartWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _publish(self) -> None:
        target = self._folder.file(self.part)
        try:
            os.rename(self._path, target)
        except FileNotFoundError:
            self._folder.make_leaf(self.part)
            os.rename(self._path, target)

    def _remove(self) -> None:
        # Should the file system be gone, the next scan finds the file without its lock.
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._close()

    def _close(self) -> None:
        self._open = False
        # Its lock goes with it. What close itself complains about (NFS: a late write error) the checksums will show.
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _take_room(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        # Where the file system cannot, the C library writes a byte to each block, which O_DIRECT refuses.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        free = os.fstatvfs(fd)
        if free.f_bavail * free.f_frsize < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        os.ftruncate(fd, nbytes)
