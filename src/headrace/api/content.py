"""The answer that is a file's content, whole or in part (RFC 9110, Range)."""

import asyncio
import os
import re
from typing import BinaryIO

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.errors import ApiError
from headrace.core.errors import InvalidRequest

BLOCK = 1 << 18
MAX_DIGITS = 18
_RANGE = re.compile(rf"bytes=[ \t]*([0-9]{{0,{MAX_DIGITS}}})-([0-9]{{0,{MAX_DIGITS}}})[ \t]*")
_RANGES = re.compile(r"bytes=[0-9, \t-]*,[0-9, \t-]*")


class Content(Response):
    """Sends a file that is open, so that it may be deleted meanwhile; closes it.

    Args:
        file: of the content, unbuffered.
        range_header: what the request asks for; several ranges at once are answered with the whole, as RFC 9110 allows.

    Raises:
        InvalidRequest, ApiError: the range is none (400), or lies behind the end (416).
    """

    def __init__(self, file: BinaryIO, range_header: str | None = None) -> None:
        self._file = file
        size = os.fstat(file.fileno()).st_size
        self._begin, self._end = 0, size
        headers = {"Accept-Ranges": "bytes"}
        part = None if range_header is None else asked_range(range_header, size)
        if part is not None:
            self._begin, self._end = part
            headers["Content-Range"] = f"bytes {self._begin}-{self._end - 1}/{size}"
        headers["Content-Length"] = str(self._end - self._begin)
        super().__init__(None, 200 if part is None else 206, headers, "application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            position = self._begin
            while position < self._end:
                count = min(BLOCK, self._end - position)
                block = await asyncio.to_thread(os.pread, self._file.fileno(), count, position)
                if not block:
                    raise OSError("a file became shorter while it was sent")
                position += len(block)
                await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._file.close()


def asked_range(header: str, size: int) -> tuple[int, int] | None:
    """The bytes (begin, end) that a `Range` asks for; None: all of them.

    Raises:
        InvalidRequest, ApiError: see `Content`.
    """
    if _RANGES.fullmatch(header):
        return None
    match = _RANGE.fullmatch(header)
    if match is None or match.groups() == ("", ""):
        raise InvalidRequest(f"the header `Range` must be as bytes=0-99, bytes=100- or bytes=-99, got {header[:100]!r}")
    first, last = match.groups()
    if not first:
        begin, end = max(0, size - int(last)), size
    else:
        begin, end = int(first), min(size, int(last) + 1 if last else size)
        if last and int(last) < begin:
            raise InvalidRequest(f"the header `Range` ends before it begins: {header[:100]!r}")
    if begin >= size:
        headers = {"Content-Range": f"bytes */{size}"}
        raise ApiError(416, f"the file has {size} bytes; none of them is in {header[:100]!r}", headers=headers)
    return begin, end
