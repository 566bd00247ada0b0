"""Waiting where an engine has no room for now."""

import asyncio

#: Nobody asks for so many seconds after a refusal.
RETRY_SECONDS = 0.25


class Backoff:
    """The way to one engine: after a refusal nobody takes it for a while, and then one after another.

    Args:
        seconds: that it is closed after a refusal.
    """

    def __init__(self, seconds: float = RETRY_SECONDS) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._opening: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Return when it is one's turn to ask; turns are in the order of the calls."""
        async with self._turn:
            await self._open.wait()

    def refused(self) -> None:
        """The engine had no room; whoever asked waits again."""
        self._open.clear()
        if self._opening is not None:
            self._opening.cancel()
        self._opening = asyncio.get_running_loop().call_later(self._seconds, self._open.set)
