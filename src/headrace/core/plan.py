"""What an engine does in one step."""

from dataclasses import dataclass, field
from typing import Literal

from headrace.core.request import ServiceClass

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that a step computes.

    Attributes:
        seq: the sequence's id.
        start: position of the first token.
        length: how many tokens (1 in plain decode, more in prefill or when several decode tokens are verified).
        sample: how many of the last positions yield logits to sample from: 0 (prefill goes on), 1, or more.
        phase: what the tokens are.
    """

    seq: str
    start: int
    length: int
    sample: int
    phase: Phase

    @property
    def end(self) -> int:
        """Position after the last token: the sequence's computed length once the step completes."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decode chunks first, then prefill chunks.

    Attributes:
        id: grows by one from plan to plan.
        chunks: what to compute, in the order of the packed row.
        service: `offline` when every chunk is; such a step may be abandoned between layers and queued again.
        repeat: for this many steps (this one included) the plan stays the same but for positions, if nothing arrives:
            no finish by length, no page edge, no preemption. A simulator jumps over them.
        predicted_s: what the step-time model expects, seconds; 0 without a model.
        compute_s, memory_s: of these, compute-bound and memory-bound work, as the device's profile has it.
        preempted: sequences that lost their pages to make this plan possible.
    """

    id: int
    chunks: tuple[Chunk, ...]
    service: ServiceClass = "online"
    repeat: int = 1
    predicted_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0
    preempted: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> int:
        """Rows of the packed batch."""
        return sum(chunk.length for chunk in self.chunks)
