"""What `headrace plan` asks about bodies: the endpoint of `batch run`, with the model's files but without an engine."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from headrace.api.app import make_state
from headrace.api.batch_endpoint import BatchEndpoint
from headrace.api.state import ServerState
from headrace.core.config import ServerConfig
from headrace.core.errors import EngineDead, HeadraceError, InvalidRequest, ModelError
from headrace.core.events import Delta, EngineInfo, EngineStats
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.front.generator import Generator
from headrace.front.tokenizer import Tokenizer
from headrace.offline.jobs.endpoint import Asked
from headrace.offline.model_limits import ModelLimits


class PlanEndpoint:
    """Understands bodies as `batch run` with the same model does.

    Args:
        find: the folder of the tokenizer and the chat template. Where it, or what is in it, cannot be had, texts are
            refused, and token ids are understood all the same.
        name: of the model in the API.
        limits: what is planned for takes.
        defaults: what the model's makers recommend.
    """

    def __init__(
        self, find: Callable[[], Path], name: str, limits: ModelLimits, defaults: SamplingParams | None = None
    ) -> None:
        self._tokenizer = _tokenizer(find)
        info = EngineInfo(
            model=name, path=str(self._tokenizer.folder or ""), fingerprint="", max_model_len=limits.context,
            vocab_size=limits.vocabulary, eos_token_ids=self._tokenizer.eos_token_ids, dtype="float32", device="cpu",
            page_size=1, pages=limits.context, kv_bytes=0, weight_bytes=0, load_seconds=0.0, pid=0,
        )  # fmt: skip
        generator = Generator(_NoEngine(info), self._tokenizer, defaults)
        state = make_state(generator, ServerConfig(served_model_name=name))
        self._endpoint = BatchEndpoint(state if limits.names is not None else _any_name(state))

    @property
    def tokenize_s(self) -> float:
        """Seconds spent on tokenising so far."""
        return self._tokenizer.seconds

    async def prepare(self, url: str, body: bytes) -> Asked:
        """See `Endpoint.prepare`."""
        return await self._endpoint.prepare(url, body)


class _Together(Tokenizer):
    """Encodes the texts that are asked for in one turn of the event loop together, on all cores.

    Attributes:
        seconds: spent on that.
        absent: why it has no token at all; empty where it has.
    """

    seconds = 0.0
    absent = ""
    _asked: list[tuple[str, bool, "asyncio.Future[list[int]]"]] | None = None

    async def encode_async(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """See `Tokenizer.encode_async`."""
        if self.absent:
            raise InvalidRequest(f"no tokenizer is at hand to plan texts with: {self.absent}", "prompt")
        if limit is not None:
            return await super().encode_async(text, add_special_tokens=add_special_tokens, limit=limit)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[int]] = loop.create_future()
        if not self._asked:
            self._asked = []
            loop.call_soon(self._encode_all)
        self._asked.append((text, add_special_tokens, future))
        return await future

    def _encode_all(self) -> None:
        begun = time.perf_counter()
        asked, self._asked = self._asked or [], None
        for special in (False, True):
            chosen = [(text, future) for text, add, future in asked if add == special]
            for (_, future), tokens in zip(chosen, self._encoded([text for text, _ in chosen], special)):
                if isinstance(tokens, InvalidRequest):
                    future.set_exception(tokens)
                else:
                    future.set_result(tokens)
        self.seconds += time.perf_counter() - begun

    def _encoded(self, texts: list[str], special: bool) -> list[list[int] | InvalidRequest]:
        try:
            return [*self.encode_many(texts, add_special_tokens=special)]
        except InvalidRequest:
            return [self._one(text, special) for text in texts]

    def _one(self, text: str, special: bool) -> list[int] | InvalidRequest:
        try:
            return self.encode(text, add_special_tokens=special)
        except InvalidRequest as error:
            return error


def _tokenizer(find: Callable[[], Path]) -> _Together:
    try:
        return cast("_Together", _Together.load(find()))
    except ModelError as error:
        empty = _Together(FastTokenizer(BPE()), {}, {})
        empty.absent = str(error)
        return empty


class _AnyName(ServerState):
    """Takes every name for its model."""

    def check_model(self, name: str | None) -> None:
        """Nothing is refused."""


def _any_name(state: ServerState) -> _AnyName:
    return _AnyName(**{each.name: getattr(state, each.name) for each in dataclasses.fields(state)})


class _NoEngine:
    """An engine's client that knows what the model takes, and runs nothing."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.dead: HeadraceError | None = EngineDead("nothing runs where a batch is planned")

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        raise EngineDead(str(self.dead))

    def abort(self, request_id: str) -> None:
        """Nothing runs."""

    def pace(self, tokens: int | None) -> None:
        """Nothing runs."""

    async def stats(self) -> EngineStats:
        raise EngineDead(str(self.dead))

    async def close(self) -> None:
        """Nothing is held."""
