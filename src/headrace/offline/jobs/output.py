"""OpenAI's batch output: one JSON object a line, for answers and for errors."""

from typing import Any

import msgspec

from headrace.offline.jobs.endpoint import Answer

_encode = msgspec.json.Encoder().encode
#: What else ends a line by Unicode; control characters are escaped by JSON itself.
_BREAKS = [(code.encode(), b"\\u%04x" % ord(code)) for code in ("\x85", "\u2028", "\u2029")]


def request_id(job: str, number: int) -> str:
    """The id of a line's result: the same whenever it is run."""
    return f"batch_req_{job.removeprefix('batch_')}{number:08x}"


def line_head(job: str) -> bytes:
    """What every line of a job's results begins with."""
    return f'{{"id":"{request_id(job, 0)[:-8]}'.encode()


def answer_line(job: str, number: int, custom_id: str, answer: Answer) -> bytes:
    """A line for what an HTTP client would have been answered, refusals too."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    line: dict[str, Any] = {"id": request_id(job, number), "custom_id": custom_id, "response": response, "error": None}
    if answer.status != 200:
        line["line"] = number
    return _one_line(line)


def error_line(
    job: str, number: int, custom_id: str | None, code: str, message: str, param: str | None = None
) -> bytes:
    """A line for what never was a request, or was not run."""
    error = {"code": code, "message": message, "param": param, "line": number}
    return _one_line({"id": request_id(job, number), "custom_id": custom_id, "response": None, "error": error})


def _one_line(value: dict[str, Any]) -> bytes:
    """JSON that is one line also for those who split text where Unicode does, e.g. Python's `str.splitlines`."""
    data: bytes = _encode(value)
    for raw, escaped in _BREAKS:
        data = data.replace(raw, escaped)
    return data + b"\n"
