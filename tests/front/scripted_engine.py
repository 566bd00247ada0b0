"""A small real engine for tests of the front: its tokens are a fixed function of the prompt, the seed and the position.

It implements `EngineClient` over asyncio queues, one task per request, and ends a request as an engine does: at a stop
token, at `max_tokens`, when aborted, or when its iterator is closed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from headrace.core.errors import EngineDead, QueueFull
from headrace.core.events import Delta, EngineInfo, EngineStats, TokenLogprob
from headrace.core.request import Request

Script = Callable[[Request, int], int]


def echo(request: Request, position: int) -> int:
    """The prompt, over and over."""
    return request.prompt[position % len(request.prompt)]


class ScriptedEngine:
    def __init__(
        self,
        vocab_size: int,
        eos: list[int],
        script: Script = echo,
        max_model_len: int = 256,
        capacity: int = 1000,
        burst: int = 1,
    ) -> None:
        self._info = EngineInfo(
            model="scripted",
            fingerprint="0",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos,
            dtype="float32",
            device="cpu",
            page_size=16,
            pages=64,
            kv_bytes=0,
            weight_bytes=0,
            load_seconds=0.0,
            pid=1,
            path="",
        )
        self._script = script
        self._capacity = capacity
        self._burst = burst
        self.running: dict[str, asyncio.Task[None]] = {}
        self.queues: dict[str, asyncio.Queue[Delta]] = {}
        self.submitted: list[Request] = []
        self.produced: dict[str, int] = {}
        self.aborted: list[str] = []
        self.alive = True

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        if not self.alive:
            raise EngineDead("the scripted engine is dead")
        if len(self.running) >= self._capacity:
            raise QueueFull("too many requests")
        assert request.id not in self.queues, "ids must be unique among the requests in flight"
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        self.submitted.append(request)
        self.queues[request.id] = queue
        task = asyncio.create_task(self._run(request, queue))
        task.add_done_callback(lambda _: self.running.pop(request.id))
        self.running[request.id] = task
        return self._stream(request.id, queue)

    async def _run(self, request: Request, queue: asyncio.Queue[Delta]) -> None:
        params = request.params
        assert params.max_tokens is not None, "the front fills it in"
        assert params.seed is not None, "the front fills it in"
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._info.eos_token_ids))
        position, finish, stop_token = 0, None, None
        while finish is None:
            tokens = []
            while len(tokens) < self._burst and finish is None:
                token = self._script(request, position)
                tokens.append(token)
                position += 1
                if token in stops and position > params.min_tokens:
                    finish, stop_token = "stop", token
                elif position >= params.max_tokens:
                    finish = "length"
            logprobs = None
            if params.logprobs is not None:
                logprobs = [TokenLogprob(token, -0.5, 1, [(token, -0.5)]) for token in tokens]
            self.produced[request.id] = position
            first = position == len(tokens)
            queue.put_nowait(Delta(request.id, tokens, finish, stop_token, logprobs, cached_tokens=3 if first else 0))
            await asyncio.sleep(0)

    async def _stream(self, request_id: str, queue: asyncio.Queue[Delta]) -> AsyncIterator[Delta]:
        finished = False
        try:
            while not finished:
                delta = await queue.get()
                if not self.alive:
                    raise EngineDead("the scripted engine died")
                finished = delta.finish is not None
                yield delta
        finally:
            del self.queues[request_id]
            if not finished:
                self._cancel(request_id)

    def pace(self, tokens: int | None) -> None:
        pass

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if self._cancel(request_id) and request_id in self.queues:
            self.queues[request_id].put_nowait(Delta(request_id, [], "abort"))

    def _cancel(self, request_id: str) -> bool:
        task = self.running.get(request_id)
        return task is not None and task.cancel()

    def die(self) -> None:
        self.alive = False
        for queue in self.queues.values():
            queue.put_nowait(Delta("", [], "error"))

    async def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running))

    async def close(self) -> None:
        for request_id in list(self.running):
            self.abort(request_id)
