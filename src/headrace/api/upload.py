"""Reading an upload (multipart/form-data) straight to disk."""

import asyncio
import os
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from headrace.api.errors import ApiError
from headrace.api.expiry import expiry_of
from headrace.api.file_info import FileInfo
from headrace.api.file_store import FileStore
from headrace.api.limits import FORM_BYTES, too_large
from headrace.api.running import ClientGone
from headrace.core.errors import InvalidRequest
from headrace.offline.jobs.errors import WrongFile
from headrace.offline.jobs.lines import BLOCK, check_head

MAX_FIELD = 4096
MAX_FIELDS = 16
MAX_HEADERS = 4096  # bytes of the headers of one part
MAX_BOUNDARY = 200
PURPOSE = "batch"


class Form:
    """The parts of a form as the parser meets them; the file's content waits in `pending` until it is written."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.has_file = self.complete = False
        self.pending = bytearray()
        self._header = self._value = b""
        self._head = 0  # bytes of the part's headers so far
        self._parts = 0
        self._name = ""
        self._is_file = False
        self._field = bytearray()

    def callbacks(self) -> Any:
        """What the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add_header(data[start:end]),
            "on_header_value": lambda data, start, end: self._add_value(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": lambda data, start, end: self._add(data[start:end]),
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_FIELDS + 1:
            raise InvalidRequest(f"a form has at most {MAX_FIELDS} fields besides the file")
        self._name, self._is_file, self._head = "", False, 0
        self._field.clear()

    def _add_header(self, data: bytes) -> None:
        self._count_head(data)
        self._header += data

    def _add_value(self, data: bytes) -> None:
        self._count_head(data)
        self._value += data

    def _count_head(self, data: bytes) -> None:
        self._head += len(data)
        if self._head > MAX_HEADERS:
            raise InvalidRequest(f"the headers of a part of a form have at most {MAX_HEADERS} bytes")

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if b"filename" in options or self._name == "file":
                if self.has_file or self._name != "file":
                    raise InvalidRequest("send exactly one file, in the field `file`", "file")
                self._is_file = self.has_file = True
                self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        self._header = self._value = b""

    def _add(self, data: bytes) -> None:
        if self._is_file:
            self.pending += data
            return
        self._field += data
        if len(self._field) > MAX_FIELD:
            raise InvalidRequest(f"a field of a form has at most {MAX_FIELD} bytes", self._name[:100])

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _finish(self) -> None:
        self.complete = True


async def receive_file(request: Request, files: FileStore, limit: int) -> FileInfo:
    """Take an upload for a batch.

    At most a block of it is in memory; what is refused, or not complete, leaves nothing behind.

    Args:
        request: with `purpose`, `file` and maybe `expires_after`.
        files: where it goes.
        limit: bytes of the file.

    Raises:
        InvalidRequest, ApiError: it is no such form, too large, or no file of requests.
        ClientGone: the client left before it was complete.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(415, "upload files as Content-Type: multipart/form-data with `purpose` and `file`")
    if len(boundary) > MAX_BOUNDARY:
        raise InvalidRequest(f"the boundary of a form has at most {MAX_BOUNDARY} bytes")
    temporary = await asyncio.to_thread(files.begin)
    try:
        form = await _write(request, boundary, files, temporary, limit)
        purpose = form.fields.get("purpose")
        if purpose != PURPOSE:
            said = "is missing" if purpose is None else f"is {purpose[:100]!r}"
            raise InvalidRequest(f"`purpose` {said}; this server takes files for the purpose `batch`", "purpose")
        if not form.has_file:
            raise InvalidRequest("the field `file` is missing", "file", "missing_required_parameter")
        name, kept_s = Path(form.filename).name, expiry_of(form.fields)
        return await asyncio.to_thread(files.publish, temporary, name, PURPOSE, kept_s=kept_s)
    finally:
        await asyncio.to_thread(files.end, temporary)


async def _write(request: Request, boundary: bytes, files: FileStore, path: Path, limit: int) -> Form:
    form = Form()
    received = written = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        parser = MultipartParser(boundary, form.callbacks())
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone()
            more = message.get("more_body", False)
            data = message.get("body", b"")
            received += len(data)
            parser.write(data)
            if written + len(form.pending) > limit:
                raise too_large(limit, "--max-file-bytes")
            if received - written - len(form.pending) > FORM_BYTES:
                raise too_large(FORM_BYTES, "limit for what stands around the file of a form")
            if len(form.pending) >= BLOCK or (not more and form.has_file):
                block = bytes(form.pending)
                form.pending.clear()
                if written == 0:
                    check_head(block, "the file")
                written += len(block)
                await asyncio.to_thread(_store, files, path, descriptor, block)
        if not form.complete:
            raise InvalidRequest("the form is not complete: its last boundary is missing", "file")
    except FormParserError as error:
        raise InvalidRequest(f"the form cannot be read: {error}", "file") from None
    except WrongFile as error:
        raise InvalidRequest(str(error), "file", "invalid_file_format") from None
    finally:
        os.close(descriptor)
    return form


def _store(files: FileStore, path: Path, descriptor: int, data: bytes) -> None:
    files.take(path, len(data))
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
