"""One client request from its first generator to its last delta: disconnects, deadlines, ticks, one clean end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.types import Receive

from headrace.api.errors import ApiError, timed_out
from headrace.api.mailbox import Mailbox, Source
from headrace.api.state import ServerState
from headrace.front.output import TextDelta

TICK_S = 10.0
STALL_S = 60.0  # a client that takes nothing for this long loses its connection

Batch = list[tuple[int, TextDelta]]


class ClientGone(ApiError):
    """The client closed its connection; nobody reads the answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


@asynccontextmanager
async def running(state: ServerState, sources: Sequence[Source], receive: Receive) -> AsyncIterator[Mailbox]:
    """Run generators until the block ends; leaving it aborts what is left.

    Inside, `Mailbox.take` raises `ClientGone`, the 408 of `request_timeout`, or the 503 of a drain. A task that
    waits for its client to take bytes for longer than `STALL_S` is cancelled.
    """
    loop = asyncio.get_running_loop()
    mailbox = Mailbox(sources)
    state.active.add(mailbox)
    watch = asyncio.create_task(_watch(receive, mailbox))
    ticker = asyncio.create_task(_tick(mailbox, asyncio.current_task()))
    limit = state.config.request_timeout
    deadline = loop.call_later(limit, mailbox.fail, timed_out(limit)) if limit > 0 else None
    try:
        yield mailbox
    finally:
        state.active.discard(mailbox)
        watch.cancel()
        ticker.cancel()
        if deadline is not None:
            deadline.cancel()
        await mailbox.close()


async def drain(
    state: ServerState,
    sources: Sequence[Source],
    receive: Receive,
    sink: Callable[[Batch], None],
) -> None:
    """Run a request that is answered in one piece, while watching for the client to leave."""
    async with running(state, sources, receive) as mailbox:
        while (batch := await mailbox.take()) is not None:
            check_finish(batch)
            sink(batch)


def check_finish(batch: Batch) -> None:
    """Raise what the engine reports of a sequence that it had to give up."""
    for _, delta in batch:
        if delta.finish == "error":
            said = delta.error or "the engine failed on this request"
            if "grammar" in said:  # it compiled, but its own steps lead nowhere or cost too much
                raise ApiError(400, said, param="structured_outputs", code="grammar_failed")
            raise ApiError(500, said, "server_error", code="engine_error")


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    mailbox.fail(ClientGone())


async def _tick(mailbox: Mailbox, owner: "asyncio.Task[None] | None") -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(TICK_S)
        mailbox.tick()
        if mailbox.writing_since and loop.time() - mailbox.writing_since > STALL_S and owner is not None:
            owner.cancel("the client takes no bytes")
