"""The text of one sequence out of its engine's deltas: detokenising, stop strings, finish reasons."""

from collections.abc import Collection
from dataclasses import dataclass

from headrace.core.events import Delta
from headrace.core.sampling import SamplingParams
from headrace.front.output import CompletionOutput, TextDelta
from headrace.front.stop import StopBuffer, StopSet
from headrace.front.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptContext:
    """What the sequences of one prompt share.

    Attributes:
        tokenizer: of the model.
        params: of the request.
        prompt_tokens: length of the prompt.
        eos: tokens that end a sequence.
        stops: automaton of the stop strings; None without any.
    """

    tokenizer: Tokenizer
    params: SamplingParams
    prompt_tokens: int
    eos: Collection[int]
    stops: StopSet | None


class SequenceText:
    """Assembles one sequence.

    Args:
        context: of its prompt.
        index: which of the prompt's n sequences.
    """

    def __init__(self, context: PromptContext, index: int) -> None:
        self._context = context
        self.index = index
        self._detokenizer = context.tokenizer.detokenizer(context.params.skip_special_tokens)
        self._stop = StopBuffer(context.stops, context.params.include_stop_str_in_output) if context.stops else None
        self._count = 0
        self._cached = 0
        self._cached_by_source: dict[str, int] | None = None
        self.finished = False

    def push(self, delta: Delta) -> TextDelta:
        """The text that `delta` makes certain.

        When a stop string is complete the sequence ends here, with finish `stop`, also where the engine goes on: the
        caller then aborts the engine's request. Tokens after the one that completed it are dropped.
        """
        self._cached = max(self._cached, delta.cached_tokens)
        self._cached_by_source = self._cached_by_source or delta.cached_by_source
        finish = delta.finish
        stop_reason: str | int | None = None if delta.stop_token in self._context.eos else delta.stop_token
        visible = len(delta.tokens) - (1 if self._hides_last(delta) else 0)
        taken = len(delta.tokens)
        texts = []
        for position, token in enumerate(delta.tokens[:visible]):
            texts.append(self._scan(self._detokenizer.push(token)))
            self._count += 1
            if self._stop is not None and self._stop.matched is not None:
                taken, finish, stop_reason = position + 1, "stop", self._stop.matched
                break
        if finish is not None and (self._stop is None or self._stop.matched is None):
            texts.append(self._scan(self._detokenizer.flush()))
            if self._stop is not None:
                texts.append(self._stop.flush())
                if self._stop.matched is not None:  # completed by the U+FFFD of a broken character
                    finish, stop_reason = "stop", self._stop.matched
        self.finished = finish is not None
        return TextDelta(
            self.index,
            "".join(texts),
            delta.tokens if taken == len(delta.tokens) else delta.tokens[:taken],
            logprobs=None if delta.logprobs is None else delta.logprobs[:taken],
            finish=finish,
            stop_reason=stop_reason,
            prompt_tokens=self._context.prompt_tokens,
            cached_tokens=self._cached,
            prompt_logprobs=delta.prompt_logprobs,
            error=delta.error,
            cached_by_source=self._cached_by_source,
        )

    def _scan(self, text: str) -> str:
        # Stop strings count from `min_tokens` on, as stop tokens do.
        if self._stop is None or self._count < self._context.params.min_tokens:
            return text
        return self._stop.push(text)

    def _hides_last(self, delta: Delta) -> bool:
        return (
            delta.stop_token is not None
            and bool(delta.tokens)
            and delta.tokens[-1] == delta.stop_token
            and not self._context.params.include_stop_str_in_output
        )


def append(completion: CompletionOutput, delta: TextDelta) -> None:
    """Join the next delta of a sequence to what is there of it."""
    completion.text += delta.text
    completion.token_ids += delta.tokens
    if delta.logprobs is not None:
        completion.logprobs = (completion.logprobs or []) + delta.logprobs
    if delta.finish is not None:
        completion.finish_reason, completion.stop_reason, completion.error = (
            delta.finish,
            delta.stop_reason,
            delta.error,
        )
