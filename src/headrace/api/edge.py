"""The outermost layer: request ids, keys, limits, counts, and an answer whatever happens inside."""

import logging
import re
import time
import traceback
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.auth import OPEN_PATHS, check_key
from headrace.api.errors import as_api_error, too_many
from headrace.api.limits import BodyBudget, LimitedBody, StreamedBody
from headrace.api.meter import Meter
from headrace.api.running import ClientGone
from headrace.api.state import ServerState

log = logging.getLogger("headrace.api")

_ID = re.compile(r"[\x21-\x7e]{1,128}")
UPLOAD_PATH = "/v1/files"
_UNLIMITED = OPEN_PATHS | {"/version", "/v1/models"}


class Edge:
    """ASGI middleware; nothing gets past it as an exception.

    Args:
        app: what it wraps.
        state: the server's.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._budget = BodyBudget(state.config.max_request_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        exchange = Exchange(self._state, scope, send)
        state = self._state
        body: LimitedBody | StreamedBody | None = None
        state.metrics.http_active += 1
        try:
            path = scope["path"]
            check_key(state.config.api_key, path, scope["headers"])
            if path not in _UNLIMITED and state.metrics.http_active > state.config.max_connections:
                raise too_many(f"the server already serves {state.config.max_connections} requests; try again later")
            if path == UPLOAD_PATH and scope["method"] == "POST":
                body = StreamedBody(receive, scope["headers"], state.config.max_file_bytes)
            else:
                body = LimitedBody(receive, scope["headers"], self._budget)
            await self._app(scope, body, exchange.send)
        except Exception as error:
            await exchange.fail(error)
        finally:
            state.metrics.http_active -= 1
            if body is not None:
                body.done()
            exchange.done()
        return None


class Exchange:
    """One request and its answer.

    The request's `Meter` lies in the scope's state, for the routes.
    """

    def __init__(self, state: ServerState, scope: Scope, send: Send) -> None:
        self._state = state
        self._scope = scope
        self._send = send
        self._status = 0
        self._meter = Meter(state.metrics)
        scope.setdefault("state", {})["meter"] = self._meter
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        self.id = given if _ID.fullmatch(given) else uuid.uuid4().hex

    async def send(self, message: Message) -> None:
        """Pass a message of the answer on."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode("latin-1"))]
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with the error's object, unless an answer is under way or nobody is there."""
        if isinstance(error, ClientGone):
            self._status = self._status or 499
            return
        face = as_api_error(error)
        if face.status == 500:
            self._log_failure(error)
        if not self._status:
            await face.response()(self._scope, _nothing, self.send)

    def done(self) -> None:
        """Count and log."""
        route = self._scope.get("route")
        handler = getattr(route, "path", "unknown")
        self._state.metrics.respond(handler, str(self._status or 499))
        if self._state.config.log_requests:
            meter = self._meter
            log.info(
                "request",
                extra={
                    "request_id": self.id,
                    "method": self._scope["method"],
                    "handler": handler,
                    "status": self._status,
                    "seconds": round(time.perf_counter() - meter.started, 4),
                    "ttft": None if meter.ttft is None else round(meter.ttft, 4),
                    "prompt_tokens": meter.prompt_tokens,
                    "cached_tokens": meter.cached_tokens,
                    "cached_by_source": meter.cached_by_source,
                    "output_tokens": meter.output_tokens,
                    "finish": meter.finish,
                },
            )

    def _log_failure(self, error: Exception) -> None:
        """What failed and where; not the exception's message, which may quote the request."""
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        log.error("request failed", extra={"request_id": self.id, "error": type(error).__name__, "at": where})


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
