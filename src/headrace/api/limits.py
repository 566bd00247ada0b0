"""How much a client may send, and how long it may take to send it."""

import asyncio
from collections.abc import Iterable

from starlette.types import Message, Receive

from headrace.api.errors import ApiError

BODY_SECONDS = 60.0


class LimitedBody:
    """Counts a request's body while it is read, whether or not its length was announced.

    Args:
        receive: the server's.
        headers: of the request.
        limit: bytes.
    """

    def __init__(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]], limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._read = 0
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self.complete = False
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise too_large(limit)

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
            self._read += len(message.get("body", b""))
            if self._read > self._limit:
                raise too_large(self._limit)
            self.complete = not message.get("more_body", False)
        else:
            self.complete = True
        return message


def too_large(limit: int) -> ApiError:
    """413; the connection ends, because the rest of the body is not read."""
    message = f"the request's body is larger than {limit} bytes, the server's --max-request-bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
