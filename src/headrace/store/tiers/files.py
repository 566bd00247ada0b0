"""A tier that keeps each part in a file: what `dir` and `memory` share."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from headrace.store.native.library import Job, read_file
from headrace.store.part import PartId
from headrace.store.tiers.folder import TierFolder
from headrace.store.tiers.os_errors import tier_error
from headrace.store.tiers.temporary import remove_abandoned
from headrace.store.tiers.tier import PartCutShort, PartMissing, Scanned, Scope
from headrace.store.tiers.writer import FilePartWriter

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
#: How exactly a file's time says when it was last read; it costs a write to the file system each time.
_USED_SECONDS = 60.0

T = TypeVar("T")


class FileTier:
    """A `Tier` of files: one per part, 0600, in a private folder of two levels.

    A part is opened for each read, never kept open: what is deleted gives its room back at once, in whatever process.

    Args:
        name: the tier's name.
        folder: where parts lie.
        capacity: bytes it may hold; whoever holds the catalog sees to it.
        scope: who sees it.
        depth: reads in flight that keep it busy.
        direct: read and write past the page cache.
        forget: where that cannot be, take what was read or written out of the page cache again.
    """

    def __init__(
        self, name: str, folder: TierFolder, capacity: int, scope: Scope, depth: int, *, direct: bool, forget: bool
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.scope: Scope = scope
        self.depth = depth
        self.direct = direct
        self._files = folder
        self._forget = forget and not direct
        self._flags = _READ | (os.O_DIRECT if direct else 0)

    @property
    def folder(self) -> Path:
        """The tier's private folder; a catalog may keep its lock and socket in it."""
        return self._files.path

    def read(self, part: PartId, offset: int, into: memoryview) -> None:
        """See `Tier.read`. A read from the start of a part marks it as used."""
        self._read(part, offset, into, None)

    def read_and_settle(self, part: PartId, offset: int, into: memoryview, job: Job) -> int:
        """See `SettlingTier.read_and_settle`."""
        self._read(part, offset, into, job)
        answer: int = job.answer
        return answer

    def _read(self, part: PartId, offset: int, into: memoryview, job: Job | None) -> None:
        path = self._files.file(part)
        try:
            done = self._again_if_present(lambda: read_file(path, self._flags, offset, into, self._forget, job))
        except FileNotFoundError as error:
            if self._files.present:
                raise PartMissing(f"tier {self.name}: there is no {part.name}") from error
            raise tier_error(self.name, f"reading {part.name}", error) from error
        except OSError as error:
            raise tier_error(self.name, f"reading {part.name}", error) from error
        if done < len(into):
            raise PartCutShort(f"tier {self.name}: {part.name} is cut short: {done} bytes at {offset} of {len(into)}")
        if offset == 0:
            _mark_used(path)

    def create(self, part: PartId, nbytes: int) -> FilePartWriter:
        """See `Tier.create`."""
        return FilePartWriter(self.name, self._files, part, nbytes, direct=self.direct, forget=self._forget)

    def delete(self, part: PartId) -> None:
        """See `Tier.delete`."""
        path = self._files.file(part)
        try:
            self._again_if_present(lambda: os.unlink(path))
        except FileNotFoundError as error:
            if not self._files.present:
                raise tier_error(self.name, f"deleting {part.name}", error) from error
        except OSError as error:
            raise tier_error(self.name, f"deleting {part.name}", error) from error

    def scan(self) -> Iterator[Scanned]:
        """See `Tier.scan`."""
        try:
            self._files.ensure()
            remove_abandoned(self._files)
            for part, found in self._files.parts():
                yield Scanned(part, found.st_size, found.st_mtime)
        except OSError as error:
            raise tier_error(self.name, "listing it", error) from error

    def close(self) -> None:
        """See `Tier.close`. Nothing is kept open."""

    def _again_if_present(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except FileNotFoundError:
            # Was it the part that was not there, or the whole folder, which has come back since?
            if not self._files.present:
                raise
            return call()


def read_fully(fd: int, offset: int, into: memoryview) -> None:
    """Fill memory from an offset of a file.

    Raises:
        EOFError: the file ends before.
        OSError: it cannot be read.
    """
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            raise EOFError(f"{done} bytes at {offset}, wanted {len(into)}")
        done += count


def _mark_used(path: str) -> None:
    # Where the file system is read-only, or it has been deleted meanwhile, a part just looks older than it is.
    with contextlib.suppress(OSError):
        if time.time() - os.lstat(path).st_mtime > _USED_SECONDS:
            os.utime(path, follow_symlinks=False)
