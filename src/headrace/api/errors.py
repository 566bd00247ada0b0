"""OpenAI's error object, and which status each kind of failure gets."""

import errno
import sqlite3
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.core.errors import EngineDead, HeadraceError, InvalidRequest, QueueFull
from headrace.offline.jobs.errors import JobBusy, JobError

RETRY_AFTER_S = 1
#: What SQLite says on a full disk: of the database, and of the index of its log, without which it cannot even be read.
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)


class ApiError(HeadraceError):
    """A failure with its HTTP face.

    Args:
        status: HTTP status code.
        message: what was wrong and what to do.
        kind: OpenAI's `error.type`.
        param: OpenAI's `error.param`.
        code: OpenAI's `error.code`.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, "application/json")


def as_api_error(error: BaseException) -> ApiError:
    """The HTTP face of any exception; what is not known becomes a 500 that tells nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFull):
        return too_many(str(error))
    if isinstance(error, EngineDead):
        return ApiError(503, f"the engine is not running: {error}", "service_unavailable", code="engine_dead")
    if isinstance(error, JobBusy):
        return ApiError(409, str(error), code="batch_busy")
    if disk_full(error):
        headers = {"Connection": "close", "x-should-retry": "false"}
        message = "the server's disk is full; delete files, or tell whoever runs it"
        return ApiError(507, message, "server_error", code="disk_full", headers=headers)
    if isinstance(error, JobError):
        return ApiError(500, " ".join(str(error).split()), "server_error", code="batch_unreadable")
    return ApiError(500, "the server failed on this request; its log says why", "server_error", code="internal_error")


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk, or a full quota, is what a failure comes from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) in _FULL:
            return True
        error = error.__cause__
    return False


def too_many(message: str) -> ApiError:
    """429 with Retry-After."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=headers)


def timed_out(seconds: float) -> ApiError:
    """408 that clients should not simply send again."""
    message = f"the request ran longer than the server's limit of {seconds:g} s; ask for fewer tokens"
    return ApiError(408, message, "timeout_error", code="request_timeout", headers={"x-should-retry": "false"})


def model_not_found(name: str, served: str) -> ApiError:
    """404 that names the model that is there."""
    alias = "" if served == "default" else " (alias `default`)"
    shown = name[:200].encode("unicode_escape").decode() if not name[:200].isprintable() else name[:200]
    message = f"The model `{shown}` does not exist; this server has `{served}`{alias}"
    return ApiError(404, message, "invalid_request_error", "model", "model_not_found")
