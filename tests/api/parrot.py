"""A small engine for tests of the HTTP front: it repeats what the prompt puts between `[[` and `]]`, then ends.

Without such a part its tokens are a walk over the letters. It implements `EngineClient` with one task per request,
keeps to `max_tokens`, `min_tokens`, stop tokens, aborts and queue limits, and reports log-probabilities that are a
function of the token.
"""

import asyncio
import os
from collections.abc import AsyncIterator

from headrace.core.errors import EngineDead, QueueFull
from headrace.core.events import Delta, EngineInfo, EngineStats, FinishReason, TokenLogprob
from headrace.core.request import Request

STALL = 3600.0


def logprob(token: int, top: int) -> TokenLogprob:
    others = [(token, -0.25), *((other, -1.0 - other) for other in range(top - 1))]
    return TokenLogprob(token, -0.25, 1, others[:top])


class Parrot:
    """See above.

    Args:
        vocab_size: of the tokenizer.
        eos: the token that ends a sequence.
        brackets: the tokens of `[[` and `]]`.
        letters: tokens of the walk.
        step: seconds between tokens.
        max_running: sequences at once; the others wait.
        max_queue: requests in flight; more are refused.
        max_model_len: prompt plus output tokens of a sequence.
        path: folder of a model's configuration.
        fingerprint: of the model.
    """

    def __init__(
        self,
        vocab_size: int,
        eos: int,
        brackets: tuple[list[int], list[int]],
        letters: list[int],
        step: float = 0.0,
        max_running: int = 64,
        max_queue: int = 1024,
        max_model_len: int = 4096,
        path: str = "",
        fingerprint: str = "f" * 64,
    ) -> None:
        self._info = EngineInfo(
            model="parrot", fingerprint=fingerprint, max_model_len=max_model_len, vocab_size=vocab_size,
            eos_token_ids=[eos],
            dtype="float32", device="cpu", page_size=16, pages=64, kv_bytes=0, weight_bytes=0, load_seconds=0.0,
            pid=os.getpid(), path=path,
        )  # fmt: skip
        self._eos = eos
        self._brackets = brackets
        self._letters = letters
        self.step = step
        self._places = asyncio.Semaphore(max_running)
        self._max_queue = max_queue
        self._dead = False
        self.streams: dict[str, asyncio.Queue[Delta | EngineDead]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.seen: list[Request] = []
        self.tokens = 0
        self.prompt_tokens = 0
        self.finished: dict[str, int] = {}
        self.stall_after: int | None = None  # so many more sequences; then a token takes longer than any test

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def dead(self) -> EngineDead | None:
        return EngineDead("the parrot is dead") if self._dead else None

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        if self._dead:
            raise EngineDead("the parrot is dead")
        if len(self.tasks) >= self._max_queue:
            raise QueueFull(f"{self._max_queue} requests are in flight already")
        assert request.id not in self.streams
        self.seen.append(request)
        self.streams[request.id] = asyncio.Queue()
        task = self.tasks[request.id] = asyncio.create_task(self._run(request))
        task.add_done_callback(lambda _: self.tasks.pop(request.id))
        return self._read(request.id, self.streams[request.id])

    def pace(self, tokens: int | None) -> None:
        pass

    def abort(self, request_id: str) -> None:
        task = self.tasks.get(request_id)
        if task is not None and task.cancel() and request_id in self.streams:
            self._end(Delta(request_id, [], "abort"))

    def die(self) -> None:
        self._dead = True
        for stream in self.streams.values():
            stream.put_nowait(EngineDead("the parrot died"))

    async def stats(self) -> EngineStats:
        if self._dead:
            raise EngineDead("the parrot is dead")
        running = min(len(self.tasks), 64)
        return EngineStats(
            running=running, waiting=len(self.tasks) - running, pages_total=64, pages_used=running,
            prompt_tokens_total=self.prompt_tokens, output_tokens_total=self.tokens, requests_total=dict(self.finished),
        )  # fmt: skip

    async def close(self) -> None:
        self.die()

    async def _read(self, request_id: str, stream: "asyncio.Queue[Delta | EngineDead]") -> AsyncIterator[Delta]:
        finished = False
        try:
            while not finished:
                delta = await stream.get()
                if isinstance(delta, EngineDead):
                    raise delta
                finished = delta.finish is not None
                yield delta
        finally:
            del self.streams[request_id]
            if not finished and request_id in self.tasks:
                self.tasks[request_id].cancel()

    async def _run(self, request: Request) -> None:
        async with self._places:
            self.prompt_tokens += len(request.prompt)
            song = self._song(request.prompt)
            params = request.params
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {self._eos})
            for position in range(params.max_tokens or 0):
                await asyncio.sleep(self.step)
                token = song[position] if position < len(song) else self._eos
                if song and position >= len(song) and params.ignore_eos:
                    token = song[position % len(song)]
                if not song:
                    seed = (params.seed or 0) if params.temperature else 0
                    token = self._letters[(sum(request.prompt) + seed + position * 7) % len(self._letters)]
                stopped = token in ends and position >= params.min_tokens
                finish: FinishReason | None = "stop" if stopped else None
                if finish is None and position + 1 == params.max_tokens:
                    finish = "length"
                self._put(request, token, position, finish, token if stopped else None)
                if finish is not None:
                    return

    def _put(
        self, request: Request, token: int, position: int, finish: FinishReason | None, stop_token: int | None
    ) -> None:
        params = request.params
        self.tokens += 1
        prompt_logprobs = None
        if params.prompt_logprobs is not None and position == 0:
            prompt_logprobs = [None, *(logprob(t, params.prompt_logprobs) for t in request.prompt[1:])]
        self._end(
            Delta(
                request.id,
                [token],
                finish,
                stop_token,
                None if params.logprobs is None else [logprob(token, params.logprobs)],
                prompt_logprobs,
                cached_tokens=len(request.prompt) // 16 * 16 if position == 0 else 0,
            )
        )

    def _end(self, delta: Delta) -> None:
        if delta.finish is not None:
            self.finished[delta.finish] = self.finished.get(delta.finish, 0) + 1
            if self.stall_after is not None:
                self.stall_after -= 1
                if self.stall_after == 0:
                    self.step = STALL
        if delta.request in self.streams:
            self.streams[delta.request].put_nowait(delta)

    def _song(self, prompt: list[int]) -> list[int]:
        begin, end = (self._last(prompt, bracket) for bracket in self._brackets)
        return prompt[begin + len(self._brackets[0]) : end] if 0 <= begin < end else []

    @staticmethod
    def _last(prompt: list[int], part: list[int]) -> int:
        for i in range(len(prompt) - len(part), -1, -1):
            if prompt[i : i + len(part)] == part:
                return i
        return -1
