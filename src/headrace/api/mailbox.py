"""Deltas of several generators in one box, taken together by one connection.

A connection that is slow, or a loop that is busy, finds more than one delta when it looks; neighbours of one
sequence are merged, so it writes fewer events. What waits is bounded by the tokens the request may generate.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from headrace.front.output import TextDelta


class Source(Protocol):
    """Deltas of one prompt; closing it aborts what still runs."""

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        """The deltas."""
        ...

    async def aclose(self) -> None:
        """Abort."""
        ...


class Mailbox:
    """Runs the generators of one client request.

    Args:
        sources: one stream per prompt, in order.

    Attributes:
        writing_since: loop time at which the connection began to wait for its client; 0 while it does not.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.writing_since = 0.0
        self._waiting: list[tuple[int, TextDelta]] = []
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._ticked = False
        self._open = len(sources)
        self._sources = list(sources)
        self._pumps = [asyncio.create_task(self._pump(i, source)) for i, source in enumerate(self._sources)]

    async def take(self) -> list[tuple[int, TextDelta]] | None:
        """What came since the last call, as (prompt, delta); empty after a `tick`, None at the end.

        Raises:
            Exception: whatever a generator raised, or `fail` was given; everything before it has been handed out.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._open == 0:
                return None
            if self._ticked:
                break
            self._wake = self._loop.create_future()
            await self._wake
        self._ticked = False
        taken, self._waiting = self._waiting, []
        return taken if len(taken) < 2 else _merged(taken)

    def fail(self, error: BaseException) -> None:
        """End the request from outside (time is up, the server ends); `take` raises this."""
        self._error = self._error or error
        self._notify()

    def tick(self) -> None:
        """Make a waiting `take` return, so that a silent connection can show it is alive."""
        self._ticked = True
        self._notify()

    async def close(self) -> None:
        """Close all generators, which aborts what still runs; returns when that is done."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for source in self._sources:  # a pump that was cancelled before its first step closed nothing
            await source.aclose()

    async def _pump(self, prompt: int, source: Source) -> None:
        try:
            async with aclosing(source):
                async for delta in source:
                    self._waiting.append((prompt, delta))
                    if self._wake is not None and not self._wake.done():
                        self._wake.set_result(None)
        except Exception as error:
            self._error = self._error or error
        finally:
            self._open -= 1
            self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def _merged(taken: list[tuple[int, TextDelta]]) -> list[tuple[int, TextDelta]]:
    """At most one delta per sequence."""
    sequences: dict[tuple[int, int], list[TextDelta]] = {}
    for prompt, delta in taken:
        sequences.setdefault((prompt, delta.index), []).append(delta)
    return [(prompt, merge(deltas)) for (prompt, _), deltas in sequences.items()]


def merge(deltas: list[TextDelta]) -> TextDelta:
    """Neighbouring deltas of one sequence as one."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [entry for delta in deltas if delta.logprobs is not None for entry in delta.logprobs]
    return replace(
        deltas[-1],
        text="".join([delta.text for delta in deltas]),
        tokens=[token for delta in deltas for token in delta.tokens],
        logprobs=logprobs if deltas[0].logprobs is not None else None,
        cached_tokens=max(delta.cached_tokens for delta in deltas),
        cached_by_source=next((delta.cached_by_source for delta in deltas if delta.cached_by_source), None),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
