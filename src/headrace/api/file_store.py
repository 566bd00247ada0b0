"""Files that clients upload and batches write: content and description side by side in one folder.

A file is there once its description is: that is written last, and renamed into place. Ids are drawn or derived here and
checked against `FILE_ID` before they become part of a path; a client's file name is only ever shown.
"""

import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from headrace.api.errors import ApiError
from headrace.api.file_info import FileInfo, check_id, no_file

log = logging.getLogger("headrace.api")

STALE_S = 86400.0
MAX_NAME = 255


class FileStore:
    """The files of one `HEADRACE_HOME`; calls block and may come from any thread.

    Args:
        folder: where they lie; made when the first one comes.
        capacity: bytes of all files together.
        elsewhere: bytes of deleted files that are in use still.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        capacity: int,
        elsewhere: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self._capacity = capacity
        self._elsewhere = elsewhere
        self._clock = clock
        self._lock = threading.Lock()
        self._used = 0  # bytes but for our own uploads; counted anew whenever an upload begins
        self._taken: dict[Path, int] = {}  # bytes of each upload that has not ended
        self._told: set[str] = set()

    def data_path(self, file_id: str) -> Path:
        """Where a file's content lies, also before it is published."""
        check_id(file_id)
        return self.folder / f"{file_id}.data"

    def begin(self) -> Path:
        """A fresh temporary file for an upload; `end` must follow, whether or not `publish` has taken it over."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".upload-", dir=self.folder)
        os.close(handle)
        path = Path(name)
        with self._lock:
            self._taken[path] = 0
            self._used = self._count() + self._elsewhere()
        return path

    def take(self, path: Path, count: int) -> None:
        """Reserve room for the next bytes of an upload.

        Args:
            path: what `begin` gave.
            count: bytes.

        Raises:
            ApiError: 413, all files together would have more than the capacity.
        """
        with self._lock:
            if self._used + sum(self._taken.values()) + count > self._capacity:
                raise ApiError(
                    413,
                    f"the server's files may have {self._capacity} bytes together (--max-files-bytes) and this one is "
                    "more than the rest; delete files first",
                    code="storage_full",
                    headers={"Connection": "close"},
                )
            self._taken[path] += count

    def end(self, path: Path) -> None:
        """An upload is over: what it took and was not published is free again."""
        with self._lock:
            path.unlink(missing_ok=True)
            self._taken.pop(path, None)

    def publish(
        self, content: Path, filename: str, purpose: str, file_id: str | None = None, kept_s: int | None = None
    ) -> FileInfo:
        """Make a file of content that is complete; the same id again changes nothing.

        Args:
            content: a path in this folder; renamed to the file's own.
            filename: what to show for it.
            purpose: see `FileInfo`.
            file_id: None: a fresh one.
            kept_s: seconds until it expires; None: never.
        """
        if file_id is not None and (known := self._known(file_id)) is not None:
            return known
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        target, created = self.data_path(file_id), int(self._clock())
        _sync(content)
        info = FileInfo(
            id=file_id,
            bytes=content.stat().st_size,
            created_at=created,
            filename=filename[:MAX_NAME] or "upload.jsonl",
            purpose=purpose,
            expires_at=None if kept_s is None else created + kept_s,
        )
        description = self._written(info)
        try:
            with self._lock:
                if content != target:
                    os.replace(content, target)
                self._used += self._taken.pop(content, 0) + description.stat().st_size
                os.replace(description, self._info_path(file_id))
        except BaseException:
            description.unlink(missing_ok=True)
            if content != target:  # nobody would know of it
                target.unlink(missing_ok=True)
            raise
        return info

    def get(self, file_id: str) -> FileInfo:
        """One file.

        Raises:
            ApiError: 404, there is none of that id (any more), or what describes it cannot be read.
        """
        info = self._read(file_id)
        if info.expired(self._clock()):
            raise no_file(file_id)
        return info

    def open(self, file_id: str) -> BinaryIO:
        """A file's content, which may then be deleted without harm to whoever reads it.

        Raises:
            ApiError: 404, there is none of that id, or its content is gone.
        """
        self.get(file_id)
        try:
            descriptor = os.open(self.data_path(file_id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ApiError(
                404, f"The content of {file_id} is not there any more", param="id", code="file_not_found"
            ) from None
        return os.fdopen(descriptor, "rb", buffering=0)

    def list(self, purpose: str | None) -> list[FileInfo]:
        """All files, or those of a purpose; the newest first."""
        now = self._clock()
        found = [info for info in self._all() if not info.expired(now) and purpose in (None, info.purpose)]
        return sorted(found, key=lambda info: (-info.created_at, info.id))

    def delete(self, file_id: str) -> None:
        """Delete a file, also one whose description or content is damaged.

        Raises:
            ApiError: 404, there is none of that id.
        """
        known = self._known(file_id)
        self._delete(file_id)
        if known is not None and known.expired(self._clock()):
            raise no_file(file_id)

    def sweep(self) -> None:
        """Delete the files that have expired."""
        now = self._clock()
        for info in self._all():
            if info.expired(now):
                with suppress(ApiError):  # deleted meanwhile
                    self._delete(info.id)

    def sweep_content(self, results: Collection[str]) -> None:
        """Delete content that has no description since a server died between the two.

        Args:
            results: ids of files that batches write, which have none before they end.
        """
        for path in self.folder.glob("file-*.data"):
            with suppress(OSError):  # deleted meanwhile, or not ours
                described = path.stem in results or self._info_path(path.stem).exists()
                if not described and self._stale(path.stat()):
                    path.unlink()

    def _all(self) -> Iterator[FileInfo]:
        """What is described in the folder, expired or not."""
        for path in self.folder.glob("file-*.json"):
            with suppress(ApiError):  # deleted meanwhile, or damaged
                yield self._read(path.stem)

    def _read(self, file_id: str) -> FileInfo:
        check_id(file_id)
        try:
            info = msgspec.json.decode(self._info_path(file_id).read_bytes(), type=FileInfo)
        except FileNotFoundError:
            raise no_file(file_id) from None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(file_id, str(error)) from None
        if info.id != file_id:
            raise self._damaged(file_id, f"it is that of {info.id[:100]!r}")
        return info

    def _delete(self, file_id: str) -> None:
        check_id(file_id)
        data = self.data_path(file_id)
        with self._lock:
            try:
                self._used -= _removed(self._info_path(file_id))
            except FileNotFoundError:
                raise no_file(file_id) from None
            with suppress(FileNotFoundError):  # gone already
                self._used -= _removed(data)

    def _written(self, info: FileInfo) -> Path:
        """A temporary file with a description, on the disk."""
        handle, name = tempfile.mkstemp(prefix=".info-", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(info))
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(name)
            raise
        return Path(name)

    def _info_path(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"

    def _known(self, file_id: str) -> FileInfo | None:
        try:
            return self._read(file_id)
        except ApiError:
            return None

    def _damaged(self, file_id: str, why: str) -> ApiError:
        """The error of a file that cannot be described; the log tells of each once."""
        if file_id not in self._told:
            self._told.add(file_id)
            log.warning("the description of a file cannot be read", extra={"file": file_id, "reason": why})
        message = f"The description of {file_id} is damaged and cannot be read; delete the file"
        return ApiError(404, message, param="id", code="file_damaged")

    def _count(self) -> int:
        """Bytes in the folder but for our own uploads; deletes what uploads left behind whose server died."""
        total = 0
        for entry in os.scandir(self.folder):
            path = Path(entry.path)
            try:
                status = entry.stat(follow_symlinks=False)
                if path in self._taken:
                    continue
                if entry.name.startswith((".upload-", ".info-")) and self._stale(status):
                    path.unlink()
                elif entry.is_file():
                    total += status.st_size
            except FileNotFoundError:  # renamed or deleted meanwhile
                continue
        return total

    def _stale(self, status: os.stat_result) -> bool:
        return self._clock() - status.st_mtime > STALE_S


def _removed(path: Path) -> int:
    """Delete a file; the bytes that are free then: none where a batch has it as its input."""
    status = path.stat()
    path.unlink()
    return status.st_size if status.st_nlink == 1 else 0


def _sync(path: Path) -> None:
    """Have a file's bytes on the disk before anything names them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
