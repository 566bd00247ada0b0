"""What the front yields to its callers: text as it comes."""

from dataclasses import dataclass, field

from headrace.core.events import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one of the n sequences of a prompt.

    Attributes:
        index: which of the n sequences, from 0.
        text: text that is final (nothing that could still become part of a stop string or a broken character).
        tokens: token ids produced since the last delta, whether or not their text is out yet.
        logprobs: one entry per token where asked for.
        finish: set in the last delta of the sequence.
        stop_reason: the stop string or stop token id that ended it, where one did (None for end-of-sequence).
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens that were not computed; known from the first delta on.
        prompt_logprobs: in the first delta where asked for; the first prompt token has none.
        error: what went wrong, with finish `error`.
        cached_by_source: `cached_tokens` by where they came from: `pool`, or a tier of the KV store.
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    cached_by_source: dict[str, int] | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One finished sequence: the deltas joined. Names as in vLLM; `error` says what went wrong, with reason `error`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt. Names as in vLLM."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def finished(self) -> bool:
        """All sequences have ended."""
        return all(output.finish_reason is not None for output in self.outputs)
