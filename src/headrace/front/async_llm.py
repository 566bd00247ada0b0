"""`headrace.AsyncLLM`: generate text on an engine in a process of its own."""

import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.core.errors import EngineDead
from headrace.core.events import EngineStats
from headrace.core.request import ServiceClass
from headrace.core.sampling import SamplingParams
from headrace.front.generator import Generator
from headrace.front.launch import launch_generator
from headrace.front.options import Prompt, encode_prompt, engine_config, plain_defaults
from headrace.front.output import TextDelta
from headrace.front.tokenizer import Tokenizer


class AsyncLLM:
    """A model on an engine process of its own: `async with AsyncLLM(...) as llm`.

    The engine starts on entering and ends on leaving. Any number of requests may be in flight at once; the caller's
    event loop shares no interpreter with the engine's step loop. Arguments as of `LLM`.

    Raises:
        ConfigError: an option is unknown or wrong.
        ModelError: (on entering) the model cannot be found, read or run.
    """

    def __init__(
        self,
        model: str = "default",
        *,
        generation_config: bool = True,
        chat_template: str | Path | None = None,
        progress: Callable[[str, float], None] | None = None,
        **options: Any,
    ) -> None:
        self.config = engine_config(model, options)
        self._chat_template = Path(chat_template) if chat_template else None
        self._generation_config = generation_config
        self._progress = progress
        self._generator: Generator | None = None

    async def __aenter__(self) -> "AsyncLLM":
        """Start the engine; ready when this returns."""
        self._generator = await launch_generator(
            self.config,
            chat_template=self._chat_template,
            generation_config=self._generation_config,
            progress=self._progress,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the engine; requests in flight raise `EngineDead`."""
        await self.generator.client.close()

    @property
    def generator(self) -> Generator:
        """What runs the requests.

        Raises:
            EngineDead: not entered yet.
        """
        if self._generator is None:
            raise EngineDead("the engine is not started; use `async with AsyncLLM(...) as llm:`")
        return self._generator

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.generator.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's defaults: what `chat`, and but for the length `generate`, use where no parameters are given."""
        return self.generator.defaults

    async def stats(self) -> EngineStats:
        """The engine's counters."""
        return await self.generator.client.stats()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        service: ServiceClass = "online",
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[TextDelta]:
        """Complete one prompt; yields text as it comes. Closing the generator aborts.

        Args:
            prompt: a text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": [...]}`.
            sampling_params: None: the model's defaults and at most 16 tokens, see `LLM.generate`.
            request_id: unique among those in flight; None: a fresh one.
            service: `offline` work fills what online work leaves.
            priority: lower runs first.
            cache_salt: KV is shared only among requests with the same salt.

        Raises:
            InvalidRequest, QueueFull, EngineDead: see `Generator.start`.
        """
        generator = self.generator
        if isinstance(prompt, str):
            tokens = await generator.tokenizer.encode_async(prompt)
        else:
            _, tokens = encode_prompt(prompt, generator.tokenizer)
        stream = await generator.start(
            tokens,
            sampling_params or plain_defaults(generator.defaults),
            request_id=request_id or uuid.uuid4().hex,
            service=service,
            priority=priority,
            cache_salt=cache_salt,
        )
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        service: ServiceClass = "online",
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[TextDelta]:
        """Answer a conversation; messages as in OpenAI's API. See `generate` and `ChatTemplate.render`."""
        tokenizer = self.tokenizer
        text = tokenizer.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        tokens = await tokenizer.encode_async(text, add_special_tokens=False)
        stream = self.generate(
            tokens,
            sampling_params or self.generator.defaults,
            request_id=request_id,
            service=service,
            priority=priority,
            cache_salt=cache_salt,
        )
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator
