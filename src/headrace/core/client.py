"""The one way to reach an engine, in this process or another."""

from collections.abc import AsyncIterator
from typing import Protocol

from headrace.core.errors import HeadraceError
from headrace.core.events import Delta, EngineInfo, EngineStats
from headrace.core.request import Request


class EngineClient(Protocol):
    """Submit, abort, stream. Two transports: in this process (`engine.inproc`) and ZeroMQ (`cluster.client`).

    All methods belong to one event loop and none of them blocks it.
    """

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        ...

    @property
    def dead(self) -> HeadraceError | None:
        """Why the engine ended, if it did."""
        ...

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Queue a request at once; the iterator yields its deltas, the last one with `finish` set.

        Closing the iterator before that (a client went away) aborts the request.

        Raises:
            QueueFull: too many requests are in flight.
            EngineDead: the engine has ended; also raised from the iterator.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; its iterator ends with finish `abort`. Unknown or finished ids are ignored."""
        ...

    def pace(self, tokens: int | None) -> None:
        """Have offline prompts fill steps up to so many tokens only; None: as far as they go."""
        ...

    async def stats(self) -> EngineStats:
        """The engine's counters, at most about a second old."""
        ...

    async def close(self) -> None:
        """Release the engine; requests in flight end with finish `abort`."""
        ...
