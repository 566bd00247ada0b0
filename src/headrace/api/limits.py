"""How much a client may send, and how long it may take to send it."""

import asyncio
from collections.abc import Iterable

from starlette.types import Message, Receive

from headrace.api.errors import ApiError, too_many

BODY_SECONDS = 60.0
FORM_BYTES = 64 << 10  # what may stand around the file in an upload
BODIES = 32  # largest bodies that may be in memory together


class BodyBudget:
    """Bytes of the bodies of all requests being served.

    Args:
        limit: of one body.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left = BODIES * limit

    def take(self, count: int) -> None:
        """Raise the 429 of a server whose memory for bodies is used up."""
        if count > self._left:
            raise too_many("the server already holds as many request bodies as it may; try again later")
        self._left -= count

    def give(self, count: int) -> None:
        """A request has ended."""
        self._left += count


class LimitedBody:
    """Counts a request's body while it is read, whether or not its length was announced.

    Args:
        receive: the server's.
        headers: of the request.
        budget: of all bodies together.
    """

    def __init__(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]], budget: BodyBudget) -> None:
        self._receive = receive
        self._budget = budget
        self._read = 0
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self.complete = False
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > budget.limit:
                raise too_large(budget.limit)

    async def __call__(self) -> Message:
        """The next message of the request.

        Raises:
            ApiError: 413 as soon as the body is too large, 408 if it does not come.
        """
        if self.complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the request's body did not come", code="request_timeout") from None
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            if self._read + size > self._budget.limit:
                raise too_large(self._budget.limit)
            self._budget.take(size)
            self._read += size
            self.complete = not message.get("more_body", False)
        else:
            self.complete = True
        return message

    def done(self) -> None:
        """The request is over: its body no longer counts."""
        self._budget.give(self._read)
        self._read = 0


class StreamedBody:
    """Counts an upload, which goes to disk as it comes: it may be large and take long, but must not stand still.

    Args:
        receive: the server's.
        headers: of the request.
        limit: bytes of the file.
    """

    def __init__(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]], limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._left = limit + FORM_BYTES
        self._complete = False
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._left:
                raise too_large(limit, "--max-file-bytes")

    async def __call__(self) -> Message:
        """The next message of the request.

        Raises:
            ApiError: 413 as soon as it is too large, 408 if nothing comes.
        """
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the request's body did not come", code="request_timeout") from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise too_large(self._limit, "--max-file-bytes")
        self._complete = not message.get("more_body", False)
        return message

    def done(self) -> None:
        """The request is over; nothing was counted against others."""


def too_large(limit: int, flag: str = "--max-request-bytes") -> ApiError:
    """413; the connection ends, because the rest of the body is not read."""
    message = f"the request's body is larger than {limit} bytes, the server's {flag}"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
