"""What the lines of a batch mean: exactly what the same bodies mean when they are posted."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from headrace.api.chat import prepare_chat
from headrace.api.chunks import encode
from headrace.api.completions import prepare_completion
from headrace.api.errors import as_api_error
from headrace.api.mailbox import Mailbox
from headrace.api.meter import Meter
from headrace.api.metrics import Metrics
from headrace.api.prepared import Prepared
from headrace.api.running import check_finish
from headrace.api.schema_chat import ChatRequest
from headrace.api.state import ServerState
from headrace.api.submit import new_id, standing, submit
from headrace.core.errors import EngineDead, HeadraceError, InvalidRequest, QueueFull
from headrace.core.sampling import SamplingParams
from headrace.offline.jobs.endpoint import Answer, Asked
from headrace.offline.jobs.lines import CHAT, COMPLETIONS, URLS
from headrace.offline.kin import kin

_PREPARE = {CHAT: prepare_chat, COMPLETIONS: prepare_completion}


class BatchEndpoint:
    """The `Endpoint` of jobs over a server's state.

    Args:
        state: the engine, its front, and the parsers that apply.
        others: the same of further engines with the same model; `run` counts from `state` on.
    """

    urls = URLS

    def __init__(self, state: ServerState, *others: ServerState) -> None:
        self._state = state
        self._workers = (state, *others)
        self._room = [_Room(_queue_of(worker) // 2) for worker in self._workers]  # the other half is for others
        self._metrics = Metrics(state.model)  # of its own: a batch says nothing of what users wait for

    @property
    def fingerprint(self) -> str:
        """Of the model."""
        return self._state.info.fingerprint

    async def prepare(self, url: str, body: bytes) -> Asked:
        """See `Endpoint.prepare`."""
        prepared = await _PREPARE[url](self._state, body)
        if prepared.request.stream:
            raise InvalidRequest("`stream` is not possible in a batch; leave it out", "stream")
        standing(prepared.request)  # else it would be refused when it runs
        count, most = _sequences(prepared), _queue_of(self._state)
        if count > most:
            raise InvalidRequest(
                f"the line asks for {count} sequences (prompts times n), the engine's queue has room for {most}: "
                "split it into several lines, or start Headrace with a larger --max-queue",
                "n" if prepared.params.n > 1 else prepared.param,
            )
        limits = [self._checked(prepared, prompt).max_tokens or 0 for prompt in prepared.prompts]
        total = sum(limits) * prepared.params.n
        return Asked(prepared.prompts, total, kin(url, total, _instructions(prepared)), prepared)

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        """See `Endpoint.run`; waits while the lines before it have half of the engine's queue."""
        async with self._room[worker].hold(_sequences(asked.handle)):
            return await self._run(asked, share, worker)

    async def _run(self, asked: Asked, share: float, worker: int) -> Answer:
        prepared: Prepared = asked.handle
        meter = Meter(self._metrics)
        whole = prepared.whole(meter)
        try:
            streams = await submit(
                self._workers[worker],
                prepared.request,
                prepared.id,
                prepared.prompts,
                prepared.params,
                prepared.param,
                service="offline",
                share=share,
            )
            mailbox = Mailbox(streams)
            try:
                while (batch := await mailbox.take()) is not None:
                    check_finish(batch)
                    whole.add(batch)
                    asked.produced = meter.output_tokens
            finally:
                await mailbox.close()
        except (QueueFull, EngineDead, asyncio.CancelledError):
            raise
        except HeadraceError as error:
            return self.refusal(error)
        return Answer(
            200, prepared.id, encode(whole.body()), meter.prompt_tokens, meter.cached_tokens, meter.output_tokens
        )

    def pace(self, worker: int, tokens: int | None) -> None:
        """See `Endpoint.pace`."""
        self._workers[worker].client.pace(tokens)

    def refusal(self, error: BaseException) -> Answer:
        """See `Endpoint.refusal`."""
        face = as_api_error(error)
        return Answer(face.status, new_id("req"), encode(face.body()))

    def _checked(self, prepared: Prepared, prompt: list[int]) -> SamplingParams:
        try:
            return self._state.generator.check(prompt, prepared.params)
        except InvalidRequest as error:
            if error.param in ("prompt", "messages"):
                raise InvalidRequest(str(error), prepared.param, error.code) from None
            raise


def _instructions(prepared: Prepared) -> Iterator[bytes]:
    if isinstance(prepared.request, ChatRequest):
        for message in prepared.request.messages:
            if message.role in ("system", "developer"):
                yield encode(message.content)


def _sequences(prepared: Prepared) -> int:
    return len(prepared.prompts) * prepared.params.n


def _queue_of(state: ServerState) -> int:
    return state.engine.scheduler.max_queue


class _Room:
    """Places in an engine's queue for the sequences of a job's lines; who finds none waits for its turn.

    Args:
        places: there are; a line with more sequences goes alone.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, count: int) -> AsyncIterator[None]:
        """Have so many places within the block."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._let_in()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._taken -= count
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if not turn.cancelled():  # else its line was given up while it waited
                if self._taken and self._taken + count > self._places:
                    return
                self._taken += count
                turn.set_result(None)
            self._waiting.popleft()
