"""The response of a streamed request: server-sent events straight to the socket."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.chunks import DONE, KEEP_ALIVE, error_event
from headrace.api.errors import as_api_error
from headrace.api.mailbox import Mailbox, Source
from headrace.api.running import Batch, ClientGone, check_finish, running
from headrace.api.state import ServerState

log = logging.getLogger("headrace.api")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Protocol):
    """Turns deltas into events."""

    def events(self, batch: Batch) -> bytes:
        """Events for new deltas; may be empty."""
        ...

    def last(self) -> bytes:
        """Events after the last delta, before `[DONE]`."""
        ...


class EventStream(Response):
    """Streams one request.

    Headers go out with the first delta, so that a request refused by the engine still gets its own status; a request
    that waits long gets them earlier, with comments that keep the connection alive.

    Args:
        state: the server's.
        sources: one stream per prompt.
        answer: writes the events.
    """

    def __init__(self, state: ServerState, sources: Sequence[Source], answer: Answer) -> None:
        self.background = None
        self.status_code = 200
        self._state = state
        self._sources = sources
        self._answer = answer
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request. Raises only before the headers are sent."""
        try:
            async with running(self._state, self._sources, receive) as mailbox:
                await self._run(mailbox, send)
        except Exception as error:
            if not self._started:
                raise
            if isinstance(error, ClientGone):  # raising with an answer under way would be logged as a fault of ours
                return
            face = as_api_error(error)
            if face.status == 500:
                log.exception("a stream failed", exc_info=error)
            await send({"type": "http.response.body", "body": error_event(face.body()) + DONE, "more_body": False})
        except asyncio.CancelledError as error:
            if "takes no bytes" not in str(error):
                raise
            if not self._started:
                raise ClientGone() from None

    async def _run(self, mailbox: Mailbox, send: Send) -> None:
        time = asyncio.get_running_loop().time
        while (batch := await mailbox.take()) is not None:
            check_finish(batch)
            data = self._answer.events(batch) if batch else KEEP_ALIVE
            if not self._started:
                await self._start(send)
            if data:
                mailbox.writing_since = time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                mailbox.writing_since = 0.0
        if not self._started:
            await self._start(send)
        await send({"type": "http.response.body", "body": self._answer.last() + DONE, "more_body": False})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
