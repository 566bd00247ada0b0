"""OpenAI's batch input: one JSON object a line, read without ever holding more than one line and one block."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.offline.jobs.errors import WrongFile, WrongLine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETIONS)

BLOCK = 1 << 20
MAX_CUSTOM_ID = 512
MAX_LINE = 16 << 20
#: Lines that a server's batch may have, blank ones too: each may cost a row and an error of a hundred bytes or more.
MAX_LINES = 10_000_000
_BOM = b"\xef\xbb\xbf"
#: What `bytes.strip` leaves.
_TEXT = re.compile(rb"[^ \t\n\r\x0b\x0c]")

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"PAR1": "Parquet",
}


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank.

    Attributes:
        number: 1 for the first line of the file.
        offset: of its first byte.
        length: bytes, without the line end.
        data: these bytes; None when there are more of them than the limit.
        end: offset of the next line.
    """

    number: int
    offset: int
    length: int
    data: bytes | None
    end: int


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line that can be a request.

    Attributes:
        custom_id: the user's name of it.
        url: the route.
        body: JSON of the request.
    """

    custom_id: str
    url: str
    body: bytes


class _Fields(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw(b"null")
    method: msgspec.Raw = msgspec.Raw(b"null")
    url: msgspec.Raw = msgspec.Raw(b"null")
    body: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(_Fields)


def check_file(path: Path, name: str | None = None, most: int | None = None) -> None:
    """Refuse what cannot be a file of requests, by its first bytes and the number of its lines.

    Args:
        path: of the file.
        name: what to call it; None: its path.
        most: lines it may have; None: any number.

    Raises:
        WrongFile: it is not there, empty, compressed or binary, or has more lines.
    """
    name = name or str(path)
    try:
        if not path.is_file():
            raise WrongFile(f"{name} is {'a folder' if path.is_dir() else 'not there'}; give a JSONL file of requests")
        with path.open("rb") as file:
            head = file.read(BLOCK)
            while head and not head.strip() and (more := file.read(BLOCK)):
                head = more
            check_head(head, name)
            if most is not None and _line_ends(file.fileno(), most) > most:
                raise WrongFile(f"{name} has more than {most:,} lines; split it into several")
    except OSError as error:
        raise WrongFile(f"cannot read {name}: {error.strerror}") from error


def check_head(head: bytes, name: str) -> None:
    """The same for the first bytes of a file; `name` is for the message.

    Raises:
        WrongFile: see `check_file`.
    """
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            raise WrongFile(f"{name} is a {kind} file; unpack it and give the JSONL itself")
    if b"\x00" in head:
        raise WrongFile(f"{name} is binary, not text; give a JSONL file, one request a line, in UTF-8")
    first = head.removeprefix(_BOM).lstrip()
    if not first:
        raise WrongFile(f"{name} is empty; give a JSONL file, one request a line")
    if first.startswith(b"["):
        raise WrongFile(f"{name} begins with a JSON array; write one object a line, without brackets around them")


def read_lines(
    descriptor: int, start: int = 0, number: int = 1, limit: int = MAX_LINE, stop: int | None = None
) -> Iterator[RawLine]:
    """Lines from byte `start`, which begins line `number`.

    At most `limit` bytes and one block are in memory. A mark at the beginning of the file (BOM) is passed over.
    Nothing from byte `stop` on is read, and a line that goes on there is left out.
    """
    position = offset = start  # of the next block; of the line being gathered
    held = bytearray()
    length = 0  # of the line so far, of which `held` keeps nothing once it is over the limit
    size = max(1, min(BLOCK, limit))  # no line that is too long lies within one block
    if start == 0 and os.pread(descriptor, len(_BOM), 0) == _BOM:
        position = offset = len(_BOM)
    while stop is None or position < stop:
        block = os.pread(descriptor, size if stop is None else min(size, stop - position), position)
        if not block:
            break
        begin = 0
        while (end := block.find(b"\n", begin)) >= 0:
            length += end - begin
            data = None if length > limit else bytes(held) + block[begin:end]
            begin = end + 1
            if data is None or data.strip():
                yield RawLine(number, offset, length, data, position + begin)
                more = 0
            else:
                more, begin = _blank_lines(block, begin)
            number, offset, length = number + 1 + more, position + begin, 0
            held.clear()
        length += len(block) - begin
        if length > limit:
            held.clear()
        else:
            held += block[begin:]
        position += len(block)
    if length and (stop is None or position < stop) and (length > limit or held.strip()):
        yield RawLine(number, offset, length, None if length > limit else bytes(held), position)


def _blank_lines(block: bytes, begin: int) -> tuple[int, int]:
    """How many lines from `begin` on are blank, and where the next one begins; takes no turn of Python for each."""
    text = _TEXT.search(block, begin)
    end = block.rfind(b"\n", begin, text.start() if text else len(block)) + 1
    return (block.count(b"\n", begin, end), end) if end else (0, begin)


def _line_ends(descriptor: int, most: int) -> int:
    """Line ends of a file; counting stops above `most`."""
    found = position = 0
    while found <= most and (block := os.pread(descriptor, BLOCK, position)):
        found += block.count(b"\n")
        position += len(block)
    return found


def parse_line(data: bytes | None, urls: tuple[str, ...], limit: int = MAX_LINE) -> BatchLine:
    """What a line asks for.

    Args:
        data: its bytes; None where they are more than the limit.
        urls: routes that are allowed.
        limit: of bytes, for the message.

    Raises:
        WrongLine: it is no request, with what its `custom_id` says as far as that can be read.
    """
    if data is None:
        raise WrongLine("line_too_long", f"the line has more than {limit} bytes")
    try:
        data.decode()
        fields = _DECODER.decode(data)
    except UnicodeDecodeError as error:
        raise WrongLine("invalid_json_line", f"the line is not UTF-8: {error.reason} at byte {error.start}") from None
    except msgspec.ValidationError:
        raise WrongLine("invalid_json_line", "the line is not a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise WrongLine("invalid_json_line", f"the line is not valid JSON: {said}") from None
    custom_id = _text(fields.custom_id)
    if custom_id is None:
        raise WrongLine("missing_required_parameter", "`custom_id` is missing", "custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"`custom_id` must be text of 1 to {MAX_CUSTOM_ID} characters"
        raise WrongLine("invalid_custom_id", message, "custom_id")
    method, url = _text(fields.method), _text(fields.url)
    if method != "POST":
        raise WrongLine("invalid_method", f"`method` must be POST, got {_shown(method)}", "method", custom_id)
    if url not in urls:
        allowed = " or ".join(urls)
        raise WrongLine("invalid_url", f"`url` must be {allowed}, got {_shown(url)}", "url", custom_id)
    body = bytes(fields.body).strip()
    if not body.startswith(b"{"):
        raise WrongLine("missing_required_parameter", "`body` must be an object", "body", custom_id)
    return BatchLine(custom_id, url, body)


def _text(raw: msgspec.Raw) -> Any:
    """A string; None where there is none; False for anything else."""
    try:
        value = msgspec.json.decode(bytes(raw))
    except (msgspec.DecodeError, RecursionError):
        return False
    return value if isinstance(value, str) or value is None else False


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return repr(value[:100]) if isinstance(value, str) else "something that is no text"
