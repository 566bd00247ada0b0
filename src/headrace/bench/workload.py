"""Batches of requests to measure with: the mixed workload, and OpenAI batch files."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.core.errors import ConfigError, InvalidRequest
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Fields of a body that are not sampling parameters and change nothing about the tokens asked for.
_IGNORED = frozenset({"model", "prompt", "messages", "stream", "stream_options", "user", "metadata", "store"})
_ALIASES = {"max_completion_tokens": "max_tokens"}
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class Item:
    """One request of a batch: `custom_id`, prompt token ids and sampling parameters with `max_tokens` set."""

    custom_id: str
    prompt: list[int]
    params: SamplingParams

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most."""
        return self.params.max_tokens or DEFAULT_MAX_TOKENS

    def request(self, suffix: str = "") -> Request:
        """The engine's request; `suffix` keeps ids of repeated runs apart."""
        return Request(id=self.custom_id + suffix, prompt=self.prompt, params=self.params, service="offline")


class Tokenizer(Protocol):
    """What text prompts need: the usual two methods of a Transformers tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens included as the model wants them."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Token ids of a conversation."""
        ...


def mixed(seed: int = 0) -> list[Item]:
    """64 requests: 32 of 630 tokens in and 16 out, four to each of 8 shared 600-token documents; 32 of 40 in, 200 out.

    Token ids are random in 100..39999, the order is shuffled; the random stream is fixed by the seed, so that other
    programs can make the same batch.
    """
    stream = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [stream.randrange(100, 40000) for _ in range(count)]

    pairs: list[tuple[list[int], int]] = []
    for _ in range(8):
        document = tokens(600)
        pairs += [(document + tokens(30), 16) for _ in range(4)]
    pairs += [(tokens(40), 200) for _ in range(32)]
    stream.shuffle(pairs)
    return items(pairs)


def items(pairs: Iterable[tuple[Sequence[int], int]], **params: Any) -> list[Item]:
    """Greedy requests of exactly the given output lengths, from (prompt, output tokens) pairs."""
    sampling = {"temperature": 0.0, "ignore_eos": True, **params}
    return [
        Item(f"r{i}", list(prompt), SamplingParams(max_tokens=count, **sampling))
        for i, (prompt, count) in enumerate(pairs)
    ]


def forced_lengths(batch: Iterable[Item]) -> list[Item]:
    """The same prompts, greedy, with exactly `max_tokens` tokens each: outputs that can be compared token by token."""
    return [
        replace(item, params=SamplingParams(max_tokens=item.max_tokens, temperature=0.0, ignore_eos=True))
        for item in batch
    ]


def write_requests(batch: Sequence[Item], path: Path, **extra: Any) -> None:
    """Write requests as an OpenAI batch file for any server or the peer scripts; `extra` goes into the bodies."""
    defaults = msgspec.to_builtins(SamplingParams())
    with path.open("w", encoding="utf-8") as file:
        for item in batch:
            changed = {k: v for k, v in msgspec.to_builtins(item.params).items() if v != defaults[k]}
            body = {"model": "default", "prompt": item.prompt, **changed, **extra}
            line = {"custom_id": item.custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
            file.write(json.dumps(line) + "\n")


def read_requests(path: Path, tokenizer: Callable[[], Tokenizer]) -> list[Item]:
    """Read an OpenAI batch file.

    Args:
        path: JSONL with `custom_id`, `url` (`/v1/completions` or `/v1/chat/completions`) and `body`.
        tokenizer: called at most once, when the first prompt that is not token ids comes.

    Raises:
        ConfigError: the file cannot be read, a line is wrong (named by its number), or there is none.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    loaded: list[Tokenizer] = []

    def load() -> Tokenizer:
        if not loaded:
            loaded.append(tokenizer())
        return loaded[0]

    batch: list[Item] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = _read_line(line, load)
            if item.custom_id in seen:
                raise ValueError(f"custom_id {item.custom_id!r} stands twice")
        except (ValueError, InvalidRequest) as error:
            raise ConfigError(f"{path} line {number}: {error}") from error
        seen.add(item.custom_id)
        batch.append(item)
    if not batch:
        raise ConfigError(f"{path} holds no request")
    return batch


def _read_line(line: str, tokenizer: Callable[[], Tokenizer]) -> Item:
    request = json.loads(line)
    if not isinstance(request, dict) or not isinstance(request.get("body"), dict):
        raise ValueError("not an object with a `body` object")
    custom_id, url, body = request.get("custom_id"), request.get("url", COMPLETIONS), request["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("`custom_id` must be text")
    if url == COMPLETIONS:
        prompt = _completion_prompt(body.get("prompt"), tokenizer)
    elif url == CHAT:
        prompt = _chat_prompt(body.get("messages"), tokenizer)
    else:
        raise ValueError(f"url {url!r} is not one of {COMPLETIONS}, {CHAT}")
    return Item(custom_id, prompt, params_of(body))


def _completion_prompt(prompt: Any, tokenizer: Callable[[], Tokenizer]) -> list[int]:
    if isinstance(prompt, str) and prompt:
        return list(tokenizer().encode(prompt))
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    raise ValueError("`prompt` must be text or a list of token ids, not empty (one prompt a line)")


def _chat_prompt(messages: Any, tokenizer: Callable[[], Tokenizer]) -> list[int]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("`messages` must be a list of messages")
    tokens = tokenizer().apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    return list(tokens)


def params_of(body: dict[str, Any]) -> SamplingParams:
    """Sampling parameters of a request body; what it leaves out is as in the API, but `max_tokens` is then 16.

    Raises:
        ValueError: a field is unknown or has the wrong type.
        InvalidRequest: a value is out of range.
    """
    values: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS}
    for name, value in body.items():
        field = _ALIASES.get(name, name)
        if field in _IGNORED or value is None:
            continue
        if field not in SamplingParams.__struct_fields__ or field == "grammar":
            raise ValueError(f"field {name!r} is not supported in a measurement")
        values[field] = [value] if field == "stop" and isinstance(value, str) else value
    try:
        params = msgspec.convert(values, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    params.check()
    return params
