"""Log-probabilities in OpenAI's two shapes: tokens as text and bytes."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.core.events import TokenLogprob
from headrace.front.output import TextDelta
from headrace.front.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; OpenAI writes this

Top = Sequence[tuple[int, float]]


class TokenText:
    """Names tokens; a token that is not whole UTF-8 is written `bytes:\\xe2\\x9c`, as OpenAI does.

    Args:
        tokenizer: of the model.
        eos: tokens that end a sequence.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos)

    def visible(self, delta: TextDelta) -> int:
        """How many of a delta's tokens are part of the text: the token that ended it is not."""
        count = len(delta.tokens)
        if delta.finish != "stop" or not count or isinstance(delta.stop_reason, str):
            return count
        last = delta.tokens[-1]
        return count - (last in self._eos if delta.stop_reason is None else last == delta.stop_reason)

    def text(self, token: int) -> str:
        """A token's own text."""
        return _readable(self._tokenizer.token_bytes(token))

    def chat(self, entries: Sequence[TokenLogprob], top: int) -> list[dict[str, Any]]:
        """`choices[].logprobs.content` of a chat completion, with `top` alternatives per token."""
        return [
            {**self._chat_entry(e.token, e.logprob), "top_logprobs": [self._chat_entry(*t) for t in e.top[:top]]}
            for e in entries
        ]

    def completion(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None], top: int, offset: int
    ) -> dict[str, list[Any]]:
        """`choices[].logprobs` of a text completion.

        Args:
            tokens: the tokens.
            entries: their log-probabilities; None for the first token of a prompt.
            top: alternatives per token.
            offset: characters of text before the first of them.
        """
        out: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, entry in zip(tokens, entries, strict=True):
            text = self.text(token)
            out["text_offset"].append(offset)
            out["tokens"].append(text)
            offset += len(text)
            if entry is None:
                out["token_logprobs"].append(None)
                out["top_logprobs"].append(None)
                continue
            out["token_logprobs"].append(_finite(entry.logprob))
            best = {self.text(t): _finite(value) for t, value in reversed(entry.top[:top])}
            best.setdefault(text, _finite(entry.logprob))
            out["top_logprobs"].append(dict(sorted(best.items(), key=lambda item: -item[1])) if top else None)
        return out

    def prompt(self, entries: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: per token, id -> log-probability, rank and text."""
        out: list[dict[str, Any] | None] = []
        for entry in entries:
            if entry is None:
                out.append(None)
                continue
            ranked = [(t, value, rank) for rank, (t, value) in enumerate(entry.top, 1)]
            ranked.append((entry.token, entry.logprob, entry.rank))
            out.append(
                {
                    str(t): {"logprob": _finite(value), "rank": rank, "decoded_token": self.text(t)}
                    for t, value, rank in ranked
                }
            )
        return out

    def _chat_entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": _readable(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _readable(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST
