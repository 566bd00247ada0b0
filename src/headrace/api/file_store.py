"""Files that clients upload and batches write: content and description side by side in one folder.

A file is there once its description is: that is written last, and renamed into place. Ids are drawn or derived here and
checked against `FILE_ID` before they become part of a path; a client's file name is only ever shown.
"""

import os
import re
import tempfile
import time
import uuid
from pathlib import Path

import msgspec
import xxhash

from headrace.api.errors import ApiError

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
STALE_S = 86400.0
MAX_NAME = 255


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's file object.

    Attributes:
        id: see `FILE_ID`.
        bytes: of the content.
        created_at: seconds since the epoch.
        filename: as the client called it.
        purpose: `batch`, or `batch_output`.
        object: always `file`.
        status: always `processed`.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileStore:
    """The files of one `HEADRACE_HOME`; calls block and may come from any thread.

    Args:
        folder: where they lie; made when the first one comes.
        capacity: bytes of all files together.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self._capacity = capacity

    def data_path(self, file_id: str) -> Path:
        """Where a file's content lies, also before it is published."""
        _checked(file_id)
        return self.folder / f"{file_id}.data"

    def begin(self) -> Path:
        """A fresh temporary file for an upload; `publish` takes it over, or the caller deletes it.

        Raises:
            ApiError: the folder is full.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        handle, name = tempfile.mkstemp(prefix=".upload-", dir=self.folder)
        os.close(handle)
        return Path(name)

    def room(self) -> int:
        """Bytes that may still be stored."""
        return self._capacity - sum(entry.stat().st_size for entry in os.scandir(self.folder) if entry.is_file())

    def publish(self, content: Path, filename: str, purpose: str, file_id: str | None = None) -> FileInfo:
        """Make a file of content that is complete; the same id again changes nothing.

        Args:
            content: a path in this folder; renamed to the file's own.
            filename: what to show for it.
            purpose: see `FileInfo`.
            file_id: None: a fresh one.
        """
        if file_id is not None and self._info_path(file_id).exists():
            return self.get(file_id)
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        target = self.data_path(file_id)
        if content != target:
            os.replace(content, target)
        info = FileInfo(
            id=file_id,
            bytes=target.stat().st_size,
            created_at=int(time.time()),
            filename=filename[:MAX_NAME] or "upload.jsonl",
            purpose=purpose,
        )
        handle, name = tempfile.mkstemp(prefix=".info-", dir=self.folder)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(info))
        os.replace(name, self._info_path(file_id))
        return info

    def get(self, file_id: str) -> FileInfo:
        """One file.

        Raises:
            ApiError: 404, there is none of that id.
        """
        _checked(file_id)
        try:
            return msgspec.json.decode(self._info_path(file_id).read_bytes(), type=FileInfo)
        except FileNotFoundError:
            raise no_file(file_id) from None

    def list(self, purpose: str | None) -> list[FileInfo]:
        """All files, or those of a purpose; the newest first."""
        found: list[FileInfo] = []
        if self.folder.is_dir():
            for path in self.folder.glob("file-*.json"):
                try:
                    info = self.get(path.stem)
                except ApiError:  # deleted meanwhile
                    continue
                if purpose is None or info.purpose == purpose:
                    found.append(info)
        return sorted(found, key=lambda info: (-info.created_at, info.id))

    def delete(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404, there is none of that id.
        """
        self.get(file_id)
        self._info_path(file_id).unlink(missing_ok=True)
        self.data_path(file_id).unlink(missing_ok=True)

    def _info_path(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"

    def _sweep(self) -> None:
        """Delete what uploads left behind whose server died."""
        for entry in os.scandir(self.folder):
            if entry.name.startswith((".upload-", ".info-")) and time.time() - entry.stat().st_mtime > STALE_S:
                Path(entry.path).unlink(missing_ok=True)


def derived_id(job: str, what: str) -> str:
    """The id of a job's result file: the same in every attempt."""
    return f"file-{xxhash.xxh3_128_hexdigest(f'{job} {what}'.encode())}"


def no_file(file_id: str) -> ApiError:
    """404."""
    shown = file_id[:100] if file_id.isprintable() else "with that id"
    return ApiError(404, f"No such File object: {shown}", param="id", code="file_not_found")


def _checked(file_id: str) -> None:
    if not FILE_ID.fullmatch(file_id):
        raise no_file(file_id)
