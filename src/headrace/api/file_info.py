"""OpenAI's file object, and the ids of files."""

import re

import msgspec
import xxhash

from headrace.api.errors import ApiError

FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's file object.

    Attributes:
        id: see `FILE_ID`.
        bytes: of the content.
        created_at: seconds since the epoch.
        filename: as the client called it.
        purpose: `batch`, or `batch_output`.
        expires_at: from then on it is gone, seconds since the epoch; None: it stays until it is deleted.
        object: always `file`.
        status: always `processed`.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    object: str = "file"
    status: str = "processed"

    def expired(self, now: float) -> bool:
        """Whether it is gone at a time."""
        return self.expires_at is not None and now >= self.expires_at


def derived_id(job: str, what: str) -> str:
    """The id of a job's result file: the same in every attempt."""
    return f"file-{xxhash.xxh3_128_hexdigest(f'{job} {what}'.encode())}"


def check_id(file_id: str) -> None:
    """Raise the 404 of an id that cannot be part of a path."""
    if not FILE_ID.fullmatch(file_id):
        raise no_file(file_id)


def no_file(file_id: str) -> ApiError:
    """404."""
    shown = file_id[:100] if file_id.isprintable() else "with that id"
    return ApiError(404, f"No such File object: {shown}", param="id", code="file_not_found")
