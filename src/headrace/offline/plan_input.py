"""Reads a batch file for planning: only what a plan needs, in memory bounded by the tokens themselves."""

import hashlib
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import ConfigError, InvalidRequest
from headrace.front.tokenizer import Tokenizer
from headrace.offline.jobs.lines import CHAT, COMPLETIONS, MAX_LINE, RawLine, check_file, read_lines
from headrace.offline.planning.requests import JobRequests

#: Where a line sets no limit: that of the API for completions; for chats, which have none, ours.
COMPLETION_TOKENS, CHAT_TOKENS = 16, 1024
Tokens = NDArray[np.int32]
_NONE: Tokens = np.zeros(0, np.int32)
#: Lines whose texts are tokenised together, by all cores.
_TOGETHER = 2048


class _Body(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class _Line(msgspec.Struct):
    custom_id: str
    body: _Body
    url: str = COMPLETIONS


@dataclass
class PlanInput:
    """A batch file as columns.

    Attributes:
        requests: of all good lines, in the file's order.
        ids: their `custom_id`.
        begins, ends: int64 [n], bytes of each request's line in the file, its line break included.
        bad: bytes (begin, end) of lines that cannot be planned.
        errors: (line number, what is wrong) of those lines, the first hundred.
        names: of the groups, by number.
        read_s, tokenize_s: seconds spent on reading and on tokenising.
    """

    requests: JobRequests
    ids: list[str]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    bad: list[tuple[int, int]] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    read_s: float = 0.0
    tokenize_s: float = 0.0


def read_plan_input(
    path: Path, tokenizer: Callable[[], Tokenizer], advance: Callable[[int], None] = lambda size: None
) -> PlanInput:
    """Read a batch file (OpenAI's format; prompts may be token ids).

    Args:
        path: of the file.
        tokenizer: called when the first text comes.
        advance: told how many bytes have been read since the last call.

    Raises:
        WrongFile: it cannot be a file of requests.
        ConfigError: it cannot be read, or has no line that can be planned.
    """
    begun = time.perf_counter()
    reader = _Reader(tokenizer)
    check_file(path)
    try:
        with path.open("rb") as file:
            for line in read_lines(file.fileno()):
                reader.line(line)
                advance(line.end - line.offset)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    result = reader.finish()
    if not result.ids:
        first = f"; line {result.errors[0][0]}: {result.errors[0][1]}" if result.errors else ""
        raise ConfigError(f"{path} has no request that can be planned{first}")
    result.read_s = time.perf_counter() - begun - result.tokenize_s
    return result


class _Reader:
    """Collects lines into columns."""

    def __init__(self, tokenizer: Callable[[], Tokenizer]) -> None:
        self._make_tokenizer = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._line = msgspec.json.Decoder(_Line)
        self._tokens = array("i")
        self._offsets = array("q", [0])
        self._limits, self._groups = array("i"), array("i")
        self._begins, self._ends = array("q"), array("q")
        self._ids: list[str] = []
        self._seen: set[str] = set()
        self._numbers: dict[tuple[str, bytes, int], int] = {}
        self._names: list[str] = []
        self._texts: list[tuple[int, str, bool]] = []  # (place, text, whether special tokens are added)
        self._waiting: list[tuple[_Request, Tokens]] = []
        self._bad: list[tuple[int, int]] = []
        self._errors: list[tuple[int, str]] = []
        self._tokenize_s = 0.0

    def line(self, line: RawLine) -> None:
        """Take one line."""
        if line.data is None:
            self._refuse(line, f"the line has {line.length:,} bytes, more than {MAX_LINE:,}")
            return
        try:
            self._take(line, line.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest, ValueError, OverflowError) as error:
            self._refuse(line, str(error))
        except RecursionError:
            self._refuse(line, "the line is nested too deeply")
        if len(self._waiting) >= _TOGETHER:
            self._flush()

    def finish(self) -> PlanInput:
        """The columns of all lines."""
        self._flush()
        requests = JobRequests(
            np.frombuffer(self._tokens, np.int32),
            np.frombuffer(self._offsets, np.int64),
            np.frombuffer(self._limits, np.int32),
            np.frombuffer(self._groups, np.int32),
        )
        begins, ends = np.frombuffer(self._begins, np.int64), np.frombuffer(self._ends, np.int64)
        return PlanInput(
            requests, self._ids, begins, ends, self._bad, self._errors, self._names, tokenize_s=self._tokenize_s
        )

    def _take(self, line: RawLine, data: bytes) -> None:
        parsed = self._line.decode(data)
        body = parsed.body
        if not parsed.custom_id:
            raise ValueError("`custom_id` is empty")
        if parsed.custom_id in self._seen:
            raise ValueError(f"`custom_id` {parsed.custom_id!r} was used before")
        if parsed.url not in (COMPLETIONS, CHAT):
            raise ValueError(f"url {parsed.url!r} is not one of {COMPLETIONS}, {CHAT}")
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if limit is None:
            limit = COMPLETION_TOKENS if parsed.url == COMPLETIONS else CHAT_TOKENS
        if not 1 <= limit < 2**31:
            raise ValueError(f"`max_tokens` must be at least 1, got {limit}")
        system = b""
        tokens: Tokens = _NONE
        if parsed.url == CHAT:
            if not body.messages:
                raise ValueError("`messages` must be a list of messages")
            first = body.messages[0]
            if first.get("role") in ("system", "developer"):
                system = hashlib.blake2b(msgspec.json.encode(first.get("content")), digest_size=8).digest()
            text = self._text_tokenizer().render_chat(body.messages, tools=body.tools)
            self._texts.append((len(self._waiting), text, False))
        elif bytes(memoryview(body.prompt)[:1]) == b"[":
            tokens = _token_ids(bytes(body.prompt))
        else:
            text = msgspec.json.decode(body.prompt, type=str) if bytes(body.prompt) else ""
            if not text:
                raise ValueError("`prompt` must be text or a list of token ids, not empty (one prompt a line)")
            self._text_tokenizer()
            self._texts.append((len(self._waiting), text, True))
        self._seen.add(parsed.custom_id)
        group = self._group(parsed.url, system, limit)
        self._waiting.append((_Request(parsed.custom_id, replace(line, data=None), limit, group), tokens))

    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def _group(self, url: str, system: bytes, limit: int) -> int:
        """The number of a kind of request: endpoint, system prompt, max_tokens within a factor of two."""
        key = url, system, limit.bit_length()
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            kind = "chat" if url == CHAT else "completion"
            words = f", system prompt {system.hex()[:6]}" if system else ""
            self._names.append(f"{kind}, up to {limit} tokens{words}")
        return self._numbers[key]

    def _flush(self) -> None:
        """Tokenise what waits, and enter it."""
        begun = time.perf_counter()
        for special in (False, True):
            chosen = [(place, text) for place, text, add in self._texts if add == special]
            encoded = self._encode([text for _, text in chosen], special)
            for (place, _), ids in zip(chosen, encoded):
                self._waiting[place] = (self._waiting[place][0], np.array(ids, np.int32))
        if self._texts:
            self._tokenize_s += time.perf_counter() - begun
        for request, tokens in self._waiting:
            if not len(tokens):
                self._refuse(request.line, "the prompt has no token, or is not valid Unicode")
                continue
            self._tokens.frombytes(tokens.tobytes())
            self._offsets.append(len(self._tokens))
            self._limits.append(request.limit)
            self._groups.append(request.group)
            self._begins.append(request.line.offset)
            self._ends.append(request.line.end)
            self._ids.append(request.id)
        self._waiting, self._texts = [], []

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        """Token ids of texts; none where a text is no Unicode."""
        if not texts:
            return []
        try:
            return self._text_tokenizer().encode_many(texts, add_special_tokens=special)
        except InvalidRequest:
            return [[]] if len(texts) == 1 else [tokens for text in texts for tokens in self._encode([text], special)]

    def _refuse(self, line: RawLine, why: str) -> None:
        self._bad.append((line.offset, line.end))
        if len(self._errors) < 100:
            self._errors.append((line.number, why))


def _token_ids(text: bytes) -> Tokens:
    """The ids of a JSON list (which it has been checked to be).

    Raises:
        ValueError: it is empty, or holds anything but non-negative integers of 31 bits.
    """
    digits = text.strip()[1:-1]
    wrong = digits.translate(None, b"0123456789, \t\r\n") or not digits.strip()
    # Numbers alone are left: NumPy reads them three times as fast as a JSON decoder makes a list.
    ids = _NONE if wrong else np.fromstring(digits.decode(), np.int64, sep=",")
    if not len(ids) or int(ids.max()) >= 2**31:
        raise ValueError("`prompt` must be text or a list of token ids, not empty (one prompt a line)")
    return ids.astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Request:
    id: str
    line: RawLine
    limit: int
    group: int
