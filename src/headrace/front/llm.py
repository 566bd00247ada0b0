"""`headrace.LLM`: generate text in this process."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.events import Delta, EngineStats
from headrace.core.request import Request
from headrace.core.sampling import GrammarSpec, SamplingParams
from headrace.front.admission import Admission
from headrace.front.assembly import SequenceText, append
from headrace.front.launch import load_front
from headrace.front.options import Prompt, as_prompts, encode_prompt, engine_config, plain_defaults
from headrace.front.output import CompletionOutput, RequestOutput
from headrace.front.tokenizer import Tokenizer


class LLM:
    """A model and an engine in this process, driven by whoever calls `generate`; no event loop is needed or used.

    Not thread-safe. A context manager: leaving it ends what is in flight.

    Args:
        model: as `--model`: `default`, a folder, a `.gguf` file or a Hugging Face id.
        generation_config: take default sampling parameters from the model's `generation_config.json`.
        chat_template: file that replaces the model's chat template.
        progress: called with a phase and how much of it is done (0..1) while the model is fetched and loaded.
        **options: fields of the engine's configuration, as `max_model_len`, `max_num_seqs`, `dtype`, `seed`, or
            vLLM's names for them (`enable_prefix_caching`, `block_size`, `kv_cache_dtype`).

    Raises:
        ConfigError: an option is unknown or wrong.
        ModelError: the model cannot be found, read or run.
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
        from headrace.engine.inproc import InProcessClient  # brings torch

        self.config = engine_config(model, options)
        self._client = InProcessClient(self.config, progress)
        # Also when the caller forgets `close`: what the KV store has not written yet is written then.
        self._let_go = weakref.finalize(self, self._client.engine.close)
        template = Path(chat_template) if chat_template else None
        self._tokenizer, self._defaults = load_front(self._client.info, self.config.model, template, generation_config)
        self._admission = Admission(self._client.info, self._tokenizer, self.config.model.seed)
        self._count = 0

    def __enter__(self) -> "LLM":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is in flight."""
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer (vLLM's name for it)."""
        return self._tokenizer

    @property
    def client(self) -> Any:
        """The engine (`InProcessClient`): counters, and single steps for experiments."""
        return self._client

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's defaults: what `chat`, and but for the length `generate`, use where no parameters are given."""
        return self._defaults

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._client.snapshot()

    def close(self) -> None:
        """End what is in flight and let go of the KV store."""
        while not self._client.idle():
            self._client.poll()
        self._let_go()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete prompts; returns when all are done, in their order.

        Args:
            prompts: one or several of: a text, a list of token ids, `{"prompt": ...}`, `{"prompt_token_ids": [...]}`.
            sampling_params: for all, or one for each; None: `get_default_sampling_params()`, and at most 16 tokens
                unless the model's `generation_config.json` says otherwise. `SamplingParams(max_tokens=None)`, as
                `SamplingParams()`, goes on as long as the context allows.
            use_tqdm: show a progress bar.
            priority: lower runs first.
            cache_salt: KV is shared only among calls with the same salt.

        Raises:
            InvalidRequest: a prompt or parameter is wrong; then nothing runs.
        """
        given = [encode_prompt(prompt, self._tokenizer) for prompt in as_prompts(prompts)]
        if sampling_params is None:
            sampling_params = plain_defaults(self._defaults)
        return self._run(given, sampling_params, use_tqdm, priority, cache_salt)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; messages as in OpenAI's API.

        See `generate` and `ChatTemplate.render` for the arguments. Without parameters an answer ends where the model
        ends it, or with the context.
        """
        if not messages:
            raise InvalidRequest("messages must hold at least one message", "messages")
        several = not isinstance(messages[0], Mapping)
        given: list[tuple[str | None, list[int]]] = []
        for conversation in messages if several else [messages]:
            text = self._tokenizer.render_chat(
                conversation,  # type: ignore[arg-type]  # told apart by its first element
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            given.append((text, self._tokenizer.encode(text, add_special_tokens=False)))
        return self._run(given, sampling_params, use_tqdm, priority, cache_salt)

    def _run(
        self,
        given: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int,
        cache_salt: str,
    ) -> list[RequestOutput]:
        params = self._each(sampling_params, len(given))
        grammars: set[GrammarSpec] = set()
        checked = []
        for (_, tokens), wanted in zip(given, params, strict=True):
            checked.append(self._admission.check(tokens, wanted))
            if wanted.grammar is not None and wanted.grammar not in grammars:
                self._admission.check_grammar(wanted.grammar)
                grammars.add(wanted.grammar)
        jobs = []
        for (text, tokens), wanted in zip(given, checked, strict=True):
            self._count += 1
            output = RequestOutput(f"{id(self):x}-{self._count}", text, tokens, [])
            output.outputs = [CompletionOutput(i) for i in range(wanted.n)]
            jobs.append(_Job(output, wanted))

        def requests() -> Iterator[tuple[Request, SequenceText, _Job]]:
            for job in jobs:
                output = job.output
                for request, text in self._admission.split(
                    output.prompt_token_ids, job.params, output.request_id, "online", priority, cache_salt
                ):
                    yield request, text, job

        self._drive(requests(), _bar(len(jobs), use_tqdm))
        return [job.output for job in jobs]

    def _drive(self, requests: "Iterator[tuple[Request, SequenceText, _Job]]", advance: Callable[[], None]) -> None:
        """Keep the engine's queue full until all requests are done; abort what is left when something is raised."""
        client, limit = self._client, self.config.scheduler.max_queue
        running: dict[str, tuple[SequenceText, _Job]] = {}
        ending = 0  # aborted for a stop string; the engine still counts them until their last delta
        waiting = deque(_take(requests, limit))
        try:
            while running or waiting:
                while waiting and len(running) + ending < limit:
                    request, text, job = waiting.popleft()
                    client.add(request)
                    running[request.id] = (text, job)
                    waiting.extend(_take(requests, 1))
                for delta in client.poll():
                    if delta.request not in running:
                        ending -= 1 if delta.finish is not None and ending else 0
                        continue
                    text, job = running[delta.request]
                    job.take(delta, text)
                    if text.finished:
                        del running[delta.request]
                        if delta.finish is None:
                            client.abort(delta.request)
                            ending += 1
                        if job.done:
                            advance()
        finally:
            for request_id in running:
                client.abort(request_id)

    def _each(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or self._defaults] * count
        if len(sampling_params) != count:
            raise InvalidRequest(f"{count} prompts but {len(sampling_params)} sampling parameters", "sampling_params")
        return list(sampling_params)


@dataclass(slots=True)
class _Job:
    """One prompt on its way."""

    output: RequestOutput
    params: SamplingParams
    finished: int = field(default=0)

    @property
    def done(self) -> bool:
        return self.finished == len(self.output.outputs)

    def take(self, delta: Delta, text: SequenceText) -> None:
        part = text.push(delta)
        append(self.output.outputs[text.index], part)
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, part.cached_tokens)
        if part.prompt_logprobs is not None:
            self.output.prompt_logprobs = part.prompt_logprobs
        self.finished += text.finished


def _take(requests: "Iterator[tuple[Request, SequenceText, _Job]]", count: int) -> "list[Any]":
    return [item for _, item in zip(range(count), requests, strict=False)]


def _bar(total: int, wanted: bool) -> Callable[[], None]:
    if not wanted:
        return lambda: None
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    bar = tqdm(total=total, desc="prompts", unit="prompt")

    def advance() -> None:
        bar.update(1)
        if bar.n >= total:
            bar.close()

    return advance
