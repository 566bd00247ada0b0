"""Text completions on the way out: deltas become chunks, or one whole answer."""

from dataclasses import dataclass, field
from typing import Any

from headrace.api.chunks import ChunkWriter, encode, usage_dict
from headrace.api.meter import Meter
from headrace.api.running import Batch
from headrace.api.token_text import TokenText
from headrace.core.events import TokenLogprob
from headrace.front.output import TextDelta


@dataclass(frozen=True)
class CompletionSpec:
    """What the answer to one request needs to know of it.

    Attributes:
        common: the answer's fields besides `choices` and `usage`.
        prompts: token ids per prompt.
        texts: text per prompt, to echo; empty without `echo`.
        n: sequences per prompt.
        echo: the text begins with the prompt.
        discard_output: nothing is to be generated (`max_tokens: 0`), so what had to be is left out.
        logprobs: alternatives per token; None: no log-probabilities.
        show_prompt_logprobs: vLLM's field was asked for by itself.
        include_usage: a stream ends with its usage.
        continuous_usage: every chunk carries the usage so far.
        return_ids: token ids are part of the answer.
    """

    common: dict[str, Any]
    prompts: list[list[int]]
    texts: list[str]
    n: int
    echo: bool
    discard_output: bool
    logprobs: int | None
    show_prompt_logprobs: bool
    include_usage: bool
    continuous_usage: bool
    return_ids: bool


@dataclass(slots=True)
class Choice:
    """One sequence, as far as it has come.

    `offset` counts the characters of the tokens' texts so far, for `text_offset`.
    """

    text: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    offset: int = 0
    began: bool = False
    finish: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class CompletionText:
    """What both forms of the answer share: one delta's text and log-probabilities, echo included."""

    def __init__(self, spec: CompletionSpec, texts: TokenText, meter: Meter) -> None:
        self.spec = spec
        self.texts = texts
        self.meter = meter
        self.choices = [Choice() for _ in range(len(spec.prompts) * spec.n)]

    def index(self, prompt: int, delta: TextDelta) -> int:
        """The place of a sequence among the choices: those of the first prompt first."""
        return prompt * self.spec.n + delta.index

    def part(self, prompt: int, delta: TextDelta) -> tuple[str, dict[str, list[Any]] | None]:
        """What a delta adds: text, and log-probabilities where asked for."""
        spec = self.spec
        choice = self.choices[self.index(prompt, delta)]
        text = "" if spec.discard_output else delta.text
        entries: dict[str, list[Any]] | None = None
        if not choice.began:
            choice.began = True
            choice.prompt_logprobs = delta.prompt_logprobs
            if spec.echo:
                text = spec.texts[prompt] + text
                if spec.logprobs is not None:
                    known = delta.prompt_logprobs or [None] * len(spec.prompts[prompt])
                    entries = self._entries(choice, spec.prompts[prompt], known)
        if spec.logprobs is not None and delta.tokens and not spec.discard_output:
            visible = self.texts.visible(delta)
            new = self._entries(choice, delta.tokens[:visible], (delta.logprobs or [])[:visible])
            entries = new if entries is None else {key: entries[key] + new[key] for key in new}
        if delta.finish is not None:
            choice.finish = "length" if spec.discard_output else delta.finish
            choice.stop_reason = None if spec.discard_output else delta.stop_reason
        return text, entries

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        output = 0 if self.spec.discard_output else self.meter.output_tokens
        return usage_dict(self.meter.prompt_tokens, output, self.meter.cached_tokens)

    def _entries(
        self, choice: Choice, tokens: list[int], known: "list[TokenLogprob] | list[TokenLogprob | None] | list[None]"
    ) -> dict[str, list[Any]]:
        entries = self.texts.completion(tokens, known, self.spec.logprobs or 0, choice.offset)
        choice.offset += sum(map(len, entries["tokens"]))
        return entries


class CompletionStream(CompletionText):
    """Writes the chunks of a streamed completion."""

    def __init__(self, spec: CompletionSpec, texts: TokenText, meter: Meter) -> None:
        super().__init__(spec, texts, meter)
        self._writer = ChunkWriter(spec.common, spec.include_usage)

    def events(self, batch: Batch) -> bytes:
        """See `streaming.Answer`."""
        self.meter.see(batch)
        return b"".join([self._event(prompt, delta) for prompt, delta in batch])

    def last(self) -> bytes:
        """See `streaming.Answer`."""
        return self._writer.usage(self.usage()) if self.spec.include_usage else b""

    def _event(self, prompt: int, delta: TextDelta) -> bytes:
        index = self.index(prompt, delta)
        first = not self.choices[index].began
        text, entries = self.part(prompt, delta)
        choice = self.choices[index]
        if not text and entries is None and delta.finish is None and not self.spec.return_ids:
            return b""
        extra = b""
        if choice.stop_reason is not None:
            extra = b',"stop_reason":' + encode(choice.stop_reason)
        if self.spec.return_ids:
            extra += b',"token_ids":' + encode([] if self.spec.discard_output else delta.tokens)
            if first:
                extra += b',"prompt_token_ids":' + encode(self.spec.prompts[prompt])
        body = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            index,
            encode(text),
            encode(entries),
            encode(choice.finish),
            extra,
        )
        return self._writer.chunk(body, self.usage() if self.spec.continuous_usage else None)


class CompletionWhole(CompletionText):
    """Gathers a completion that is answered in one piece."""

    def add(self, batch: Batch) -> None:
        """Take new deltas."""
        self.meter.see(batch)
        for prompt, delta in batch:
            choice = self.choices[self.index(prompt, delta)]
            text, entries = self.part(prompt, delta)
            choice.text.append(text)
            if not self.spec.discard_output:
                choice.tokens += delta.tokens
            for key, values in (entries or {}).items():
                choice.logprobs.setdefault(key, []).extend(values)

    def body(self) -> dict[str, Any]:
        """The response."""
        choices = [self._choice(i, choice) for i, choice in enumerate(self.choices)]
        return {**self.spec.common, "choices": choices, "usage": self.usage()}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": choice.logprobs or None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self.spec.show_prompt_logprobs and choice.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.texts.prompt(choice.prompt_logprobs)
        if self.spec.return_ids:
            body["token_ids"] = choice.tokens
            body["prompt_token_ids"] = self.spec.prompts[index // self.spec.n]
        return body
