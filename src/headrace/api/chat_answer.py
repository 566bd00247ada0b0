"""Chat completions on the way out: deltas of text become chunks, or one whole answer."""

from dataclasses import dataclass, field
from typing import Any

from headrace.api.chunks import ChunkWriter, encode, usage_dict
from headrace.api.meter import Meter
from headrace.api.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from headrace.api.reasoning import ThinkSplitter
from headrace.api.running import Batch
from headrace.api.token_text import TokenText
from headrace.api.tool_parser import HermesParser
from headrace.core.events import TokenLogprob
from headrace.front.output import TextDelta


class ChatParser:
    """Reasoning, then tool calls, out of one sequence's text."""

    def __init__(self, think: ThinkSplitter | None, hermes: HermesParser | None) -> None:
        self._think = think
        self._hermes = hermes
        self.plain = think is None and hermes is None

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._hermes is not None and self._hermes.calls > 0

    def feed(self, text: str, last: bool) -> list[Piece]:
        """New pieces; with `last`, also what was held back."""
        pieces: list[Piece] = [Content(text)] if text else []
        if self._think is not None:
            pieces = self._think.feed(text)
            if last:
                pieces += self._think.finish()
        if self._hermes is None:
            return pieces
        out: list[Piece] = []
        for piece in pieces:
            out += self._hermes.feed(piece.text) if isinstance(piece, Content) else [piece]
        return out + self._hermes.finish() if last else out


@dataclass(frozen=True)
class ChatSpec:
    """What the answer to one request needs to know of it.

    Attributes:
        common: the answer's fields besides `object`, `choices` and `usage`.
        n: how many sequences.
        hermes: parse tool calls.
        parallel: more than one call may stand.
        think: parse reasoning; `opened` tells whether the prompt ends inside it.
        opened: see `think`.
        show_reasoning: False leaves the reasoning out of the answer.
        top_logprobs: alternatives per token; None: no log-probabilities.
        include_usage: a stream ends with its usage.
        continuous_usage: every chunk carries the usage so far.
        prompt_ids: returned where `return_token_ids` asks for it, else None.
    """

    common: dict[str, Any]
    n: int
    hermes: bool
    parallel: bool
    think: bool
    opened: bool
    show_reasoning: bool
    top_logprobs: int | None
    include_usage: bool
    continuous_usage: bool
    prompt_ids: list[int] | None

    def parser(self) -> ChatParser:
        """A fresh parser for one sequence."""
        return ChatParser(
            ThinkSplitter(self.opened) if self.think else None, HermesParser(self.parallel) if self.hermes else None
        )


def finish_reason(delta: TextDelta, called: bool) -> str | None:
    """OpenAI's name for how a sequence ended."""
    return "tool_calls" if called and delta.finish == "stop" else delta.finish


class ChatStream:
    """Writes the chunks of a streamed chat."""

    def __init__(self, spec: ChatSpec, texts: TokenText, meter: Meter) -> None:
        self._spec = spec
        self._texts = texts
        self._meter = meter
        self._parsers = [spec.parser() for _ in range(spec.n)]
        self._began = [False] * spec.n
        self._writer = ChunkWriter({**spec.common, "object": "chat.completion.chunk"}, spec.include_usage)

    def events(self, batch: Batch) -> bytes:
        """See `streaming.Answer`."""
        self._meter.see(batch)
        return b"".join([self._delta_events(delta) for _, delta in batch])

    def last(self) -> bytes:
        """See `streaming.Answer`."""
        return self._writer.usage(self._usage()) if self._spec.include_usage else b""

    def _delta_events(self, delta: TextDelta) -> bytes:
        parser = self._parsers[delta.index]
        out = b""
        if not self._began[delta.index]:
            self._began[delta.index] = True
            out = self._chunk(delta.index, b'{"role":"assistant","content":""}')
        last = delta.finish is not None
        if parser.plain:
            contents = [b'{"content":' + encode(delta.text) + b"}"] if delta.text else []
        else:
            contents = [self._piece(piece) for piece in parser.feed(delta.text, last)]
            contents = [content for content in contents if content]
        extra = self._extra(delta)
        if extra and not contents:
            contents = [b'{"content":""}']
        for content in contents:
            out += self._chunk(delta.index, content, extra)
            extra = b""
        if last:
            finish = encode(finish_reason(delta, parser.called))
            stop = b',"stop_reason":' + encode(delta.stop_reason) if delta.stop_reason is not None else b""
            out += self._chunk(delta.index, b"{}", stop, finish)
        return out

    def _chunk(self, index: int, delta: bytes, extra: bytes = b"", finish: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"delta":%b,"finish_reason":%b%b}' % (index, delta, finish, extra)
        return self._writer.chunk(choice, self._usage() if self._spec.continuous_usage else None)

    def _extra(self, delta: TextDelta) -> bytes:
        """Log-probabilities and token ids, with the first chunk of a delta."""
        extra = b""
        if self._spec.top_logprobs is not None and delta.tokens:
            content = self._texts.chat((delta.logprobs or [])[: self._texts.visible(delta)], self._spec.top_logprobs)
            extra = b',"logprobs":' + encode({"content": content, "refusal": None})
        if self._spec.prompt_ids is not None and delta.tokens:
            extra += b',"token_ids":' + encode(delta.tokens)
        return extra

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                return b'{"content":' + encode(text) + b"}"
            case Reasoning(text):
                return b'{"reasoning_content":' + encode(text) + b"}" if self._spec.show_reasoning else b""
            case CallStart(index, id, name):
                call: dict[str, Any] = {"index": index, "id": id, "type": "function"}
                call["function"] = {"name": name, "arguments": ""}
            case CallArguments(index, text):
                call = {"index": index, "function": {"arguments": text}}
        return encode({"tool_calls": [call]})

    def _usage(self) -> dict[str, Any]:
        return usage_dict(self._meter.prompt_tokens, self._meter.output_tokens, self._meter.cached_tokens)


@dataclass(slots=True)
class Choice:
    """One sequence of an answer in one piece."""

    parser: ChatParser
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: TextDelta | None = None

    def add(self, delta: TextDelta, visible: int) -> None:
        """Take the next delta, of whose tokens the first `visible` are part of the text."""
        for piece in self.parser.feed(delta.text, delta.finish is not None):
            match piece:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallStart(_, id, name):
                    self.calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
                case CallArguments(_, text):
                    self.calls[-1]["function"]["arguments"] += text
        self.logprobs += (delta.logprobs or [])[:visible]
        self.tokens += delta.tokens
        self.end = delta

    def message(self, show_reasoning: bool) -> dict[str, Any]:
        """The assistant's message."""
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self.calls else "")}
        message["refusal"] = None
        if self.reasoning and show_reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatWhole:
    """Gathers a chat that is answered in one piece."""

    def __init__(self, spec: ChatSpec, texts: TokenText, meter: Meter) -> None:
        self._spec = spec
        self._texts = texts
        self._meter = meter
        self._choices = [Choice(spec.parser()) for _ in range(spec.n)]
        self._prompt_logprobs: list[TokenLogprob | None] | None = None

    def add(self, batch: Batch) -> None:
        """Take new deltas."""
        self._meter.see(batch)
        for _, delta in batch:
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = delta.prompt_logprobs
            self._choices[delta.index].add(delta, self._texts.visible(delta))

    def body(self) -> dict[str, Any]:
        """The response."""
        meter = self._meter
        body = {
            **self._spec.common,
            "object": "chat.completion",
            "choices": [self._choice(i, choice) for i, choice in enumerate(self._choices)],
            "usage": usage_dict(meter.prompt_tokens, meter.output_tokens, meter.cached_tokens),
        }
        if self._prompt_logprobs is not None:
            body["prompt_logprobs"] = self._texts.prompt(self._prompt_logprobs)
        if self._spec.prompt_ids is not None:
            body["prompt_token_ids"] = self._spec.prompt_ids
        return body

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        top = self._spec.top_logprobs
        body: dict[str, Any] = {"index": index, "message": choice.message(self._spec.show_reasoning), "logprobs": None}
        if top is not None:
            body["logprobs"] = {"content": self._texts.chat(choice.logprobs, top), "refusal": None}
        body["finish_reason"] = finish_reason(choice.end, choice.parser.called) if choice.end else None
        body["stop_reason"] = choice.end.stop_reason if choice.end else None
        if self._spec.prompt_ids is not None:
            body["token_ids"] = choice.tokens
        return body
