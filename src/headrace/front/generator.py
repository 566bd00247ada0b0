"""Text generation over any engine client: what the HTTP routes and `AsyncLLM` call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from headrace.core.client import EngineClient
from headrace.core.errors import EngineDead
from headrace.core.events import Delta
from headrace.core.request import OFFLINE_SHARE, Request, ServiceClass
from headrace.core.sampling import SamplingParams
from headrace.front.admission import Admission
from headrace.front.assembly import SequenceText
from headrace.front.output import TextDelta
from headrace.front.tokenizer import Tokenizer


class Generator:
    """Prompts in, text out, over one engine.

    Args:
        client: of the engine.
        tokenizer: of its model.
        defaults: sampling parameters where a caller gives none.
        seed: of the seeds drawn for requests without one; 0: from the system.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        defaults: SamplingParams | None = None,
        seed: int = 0,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.defaults = defaults or SamplingParams()
        self._admission = Admission(client.info, tokenizer, seed)

    def check(self, prompt_ids: list[int], params: SamplingParams | None = None) -> SamplingParams:
        """The parameters that `start` would use: `max_tokens` and `seed` filled in. A grammar is not looked at.

        Raises:
            InvalidRequest: a parameter is wrong or the context too short.
        """
        return self._admission.check(prompt_ids, params or self.defaults)

    async def start(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str,
        service: ServiceClass = "online",
        priority: int = 0,
        cache_salt: str = "",
        share: float = OFFLINE_SHARE,
    ) -> "TextStream":
        """Check and submit; the deltas of all n sequences then come from the stream.

        Errors come from here, before a byte of an answer is out. Close the stream (`aclose`, or `aclosing`) when done
        with it: that aborts what still runs.

        Args:
            prompt_ids: the prompt.
            params: how to sample; None: the defaults.
            request_id: unique among those in flight.
            service: `offline` work fills what online work leaves.
            priority: lower runs first.
            cache_salt: KV is shared only among requests with the same salt.
            share: of steps, see `core.request.Request`.

        Raises:
            InvalidRequest: a parameter is wrong or the context too short.
            QueueFull: the engine has too much to do.
            EngineDead: the engine has ended.
        """
        checked = self.check(prompt_ids, params)
        if checked.grammar is not None:
            await asyncio.to_thread(self._admission.check_grammar, checked.grammar)
        children = self._admission.split(prompt_ids, checked, request_id, service, priority, cache_salt, share)
        stream = TextStream()
        try:
            stream.submit(self.client, children)
        except BaseException:
            await stream.aclose()  # the first ones may be in, where a later one was refused
            raise
        return stream

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str,
        service: ServiceClass = "online",
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[TextDelta]:
        """`start` and the stream in one; see there. Closing the generator aborts what still runs."""
        stream = await self.start(
            prompt_ids,
            params,
            request_id=request_id,
            service=service,
            priority=priority,
            cache_salt=cache_salt,
        )
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()


class TextStream:
    """The deltas of a request's sequences, as they come; ends when all sequences have.

    Of each sequence at most one delta waits here; the others wait in the engine client, so a slow reader holds up
    nobody else and memory stays bounded by `max_tokens`.
    """

    def __init__(self) -> None:
        self._children: list[_Child] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._open = 0

    def submit(self, client: EngineClient, children: list[tuple[Request, SequenceText]]) -> None:
        """Hand the sequences to the engine; called once."""
        for request, text in children:
            self._children.append(_Child(client, request, text))
        self._open = len(self._children)
        if self._open > 1:
            ready: asyncio.Queue[TextDelta | BaseException] = asyncio.Queue(self._open)
            self._ready = ready
            # The pumps know the queue but not this stream, so that a forgotten stream is collected and aborts.
            self._pumps = [asyncio.create_task(_pump(child, ready)) for child in self._children]

    def __aiter__(self) -> "TextStream":
        """Itself."""
        return self

    async def __anext__(self) -> TextDelta:
        """The next delta of any of the sequences.

        Raises:
            EngineDead: the engine has ended.
        """
        if self._open == 0:
            raise StopAsyncIteration
        try:
            if self._pumps:
                ready = await self._ready.get()
                if isinstance(ready, BaseException):
                    raise ready
                delta = ready
            else:
                delta = await self._children[0].next()
        except BaseException:
            await self.aclose()
            raise
        if delta.finish is not None:
            self._open -= 1
        return delta

    async def aclose(self) -> None:
        """Abort the sequences that still run and let go of the engine's iterators. May be called twice."""
        self._open = 0
        self._abort()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for child in self._children:
            await child.close()

    def __del__(self) -> None:
        self._abort()  # a stream that nobody read to the end or closed: at least the engine must not go on
        for pump in self._pumps:
            if not pump.done() and not pump.get_loop().is_closed():
                pump.cancel()

    def _abort(self) -> None:
        for child in self._children:
            child.abort()


class _Child:
    """One sequence in flight."""

    def __init__(self, client: EngineClient, request: Request, text: SequenceText) -> None:
        self._client = client
        self._id = request.id
        self._text = text
        self._deltas: AsyncIterator[Delta] = client.submit(request)
        self._running = True
        self._started = False

    async def next(self) -> TextDelta:
        """The next delta; aborts the engine's request where a stop string has ended the text."""
        self._started = True
        try:
            delta = await anext(self._deltas)
        except StopAsyncIteration:
            self._running = False
            raise EngineDead(f"the engine ended request {self._id} without a reason") from None
        except EngineDead:
            self._running = False
            raise
        text = self._text.push(delta)
        if delta.finish is not None:
            self._running = False
        elif self._text.finished:
            self.abort()
        if self._text.finished:
            await self.close()
        return text

    def abort(self) -> None:
        """Tell the engine to stop, once."""
        if self._running:
            self._running = False
            self._client.abort(self._id)

    async def close(self) -> None:
        """Let go of the engine's iterator."""
        if not self._started:
            # Closing an async generator that never ran cleans nothing up; it has to be run, to its near end.
            self._started = True
            self.abort()
            with suppress(EngineDead):
                async for _ in self._deltas:
                    pass
        aclose = getattr(self._deltas, "aclose", None)
        if aclose is not None:
            await aclose()


async def _pump(child: _Child, ready: "asyncio.Queue[TextDelta | BaseException]") -> None:
    try:
        finished = False
        while not finished:
            delta = await child.next()
            finished = delta.finish is not None
            await ready.put(delta)
    except Exception as error:
        await ready.put(error)
    finally:
        await child.close()
