"""uvicorn's HTTP protocol with a bound on what stands before a body: request line and headers."""

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose headers are too long (431) or too slow to come (408).

    The server's own limits act on complete requests; without these bounds a client could make the front hold headers
    without end before any key is checked. What one read of the socket brings counts as a whole, so the bound is
    `HEAD_BYTES` plus one read.
    """

    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client connects: its first headers are due."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count while headers are read."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", f"headers exceed {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """A request begins, perhaps a later one on the same connection."""
        if not self._in_head:
            self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The headers are whole; bodies have their own bounds."""
        self._in_head = False
        self._head_bytes = 0
        self._cancel_timer()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._cancel_timer()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _late(self) -> None:
        if self._in_head and not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", f"headers took more than {HEAD_SECONDS:.0f} s")

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, len(body), body)
        )
        self.transport.close()
