"""What the sampler is asked, per row of logits, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.core.events import TokenLogprob
from headrace.core.sampling import SamplingParams
from headrace.engine.sampling.grammar import Matcher
from headrace.engine.sampling.penalties import PenaltyCounts


class RowState:
    """What sampling remembers of one sequence. Made by `Sampler.open`.

    Everything in it is derived from the output so far, and it follows the output it is shown: after a preemption or a
    resume elsewhere nothing needs to be restored.

    Args:
        params: the sequence's sampling parameters.
        prompt: its prompt.
        forbidden: tokens that may not come before `params.min_tokens` tokens have.
        matcher: position in the grammar, where there is one.
    """

    __slots__ = ("_bias_ids", "_bias_values", "forbidden", "matcher", "min_tokens", "penalties", "plain")

    def __init__(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int32],
        forbidden: npt.NDArray[np.int32],
        matcher: Matcher | None,
    ) -> None:
        bias = params.logit_bias or {}
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.penalties = PenaltyCounts(params, prompt) if params.penalised else None
        self.min_tokens = params.min_tokens if len(forbidden) else 0
        self.forbidden = forbidden
        self.matcher = matcher
        self.plain = not bias and self.penalties is None and matcher is None and self.min_tokens == 0

    def resume(self, output: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Catch up with `output` now rather than in the next `Sampler.sample`."""
        output = np.asarray(output, np.int32)
        if self.penalties is not None:
            self.penalties.follow(output)
        if self.matcher is not None:
            self.matcher.follow(output)

    def changes(self, generated: int) -> bool:
        """Whether the logits after `generated` tokens will be changed before the draw."""
        return not self.plain and (
            generated < self.min_tokens
            or len(self._bias_ids) > 0
            or self.penalties is not None
            or self.matcher is not None
        )

    def adjust(self, row: npt.NDArray[np.float32], output: npt.NDArray[np.int32]) -> None:
        """Apply logit bias, penalties and min_tokens to one row of logits [V], in place; the grammar comes later."""
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias_values
        if self.penalties is not None:
            self.penalties.follow(output)
            self.penalties.apply(row)
        if self.matcher is None and len(output) < self.min_tokens:
            row[self.forbidden] = -np.inf


@dataclass(slots=True)
class SampleRow:
    """One row of logits to sample from.

    Attributes:
        params: the sequence's sampling parameters.
        seed: its seed, 64 bits.
        position: position in the sequence, prompt included, of the token to be drawn.
        prompt: int32 token ids.
        output: int32, what has been generated up to this position; the state follows it.
        state: made by `Sampler.open` for this sequence.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]
    state: RowState


@dataclass(slots=True)
class SampleResult:
    """Drawn tokens.

    Attributes:
        tokens: int32 [R]; -1 where there is an error.
        logprobs: per row, where its parameters ask for them.
        errors: row -> why no token could be drawn; the other rows are not affected.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: Sequence[TokenLogprob | None]
    errors: dict[int, str] = field(default_factory=dict)
