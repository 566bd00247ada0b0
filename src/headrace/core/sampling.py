"""How a request's tokens are chosen."""

from typing import Literal

import msgspec

from headrace.core.errors import InvalidRequest

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_N = 128


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint on the generated text.

    Attributes:
        kind: which language `text` is written in.
        text: a JSON schema, a regular expression, a JSON array of choices, or a Lark grammar; empty for `json_object`.
    """

    kind: GrammarKind
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters with vLLM's names and meanings.

    Attributes:
        n: how many sequences to generate for one prompt.
        max_tokens: at most this many new tokens; None: as many as the context allows.
        min_tokens: end-of-sequence and stop tokens are forbidden before this many tokens.
        temperature: 0 is greedy.
        top_p: smallest set of tokens whose probability reaches this; in (0, 1].
        top_k: only the k most probable tokens; 0 or -1: all.
        min_p: only tokens at least this probable relative to the most probable one; in [0, 1].
        presence_penalty: subtracted from the logit of every token generated before; in [-2, 2].
        frequency_penalty: subtracted once per earlier occurrence; in [-2, 2].
        repetition_penalty: divides (multiplies where negative) logits of tokens in prompt or output; > 0.
        seed: same seed and prompt, same text; None: a fresh seed is drawn at submission.
        logit_bias: added to the logits of these token ids, in [-100, 100].
        logprobs: report the chosen token's log-probability and this many alternatives; None: none.
        prompt_logprobs: the same for prompt tokens.
        stop: strings that end the text; excluded from it unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the text (the token is not part of it).
        ignore_eos: go on after end-of-sequence tokens.
        skip_special_tokens: leave special tokens out of the text.
        grammar: constrain the text.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature < 1e-5

    @property
    def penalised(self) -> bool:
        """True when earlier tokens change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check(self, vocab_size: int | None = None) -> None:
        """Raise `InvalidRequest` naming the first field whose value is out of range."""
        _within("n", self.n, 1, MAX_N)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        _within("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        _within("temperature", self.temperature, 0, 100)
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, got {self.top_p}", "top_p")
        _within("top_k", self.top_k, -1, 1 << 31)
        _within("min_p", self.min_p, 0, 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        if not 0 < self.repetition_penalty <= 100:
            raise InvalidRequest(
                f"repetition_penalty must be above 0 and at most 100, got {self.repetition_penalty}",
                "repetition_penalty",
            )
        if self.seed is not None:
            _within("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", "stop")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop strings must not be empty", "stop")
        self._check_ids(vocab_size)

    def _check_ids(self, vocab_size: int | None) -> None:
        for token, bias in (self.logit_bias or {}).items():
            if not -100 <= bias <= 100:  # also refuses nan
                raise InvalidRequest(f"logit_bias of token {token} must be in [-100, 100], got {bias}", "logit_bias")
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise InvalidRequest(f"logit_bias names token {token}, not in the vocabulary", "logit_bias")
        for token in self.stop_token_ids:
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise InvalidRequest(f"stop_token_ids names token {token}, not in the vocabulary", "stop_token_ids")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses nan
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}", name)
