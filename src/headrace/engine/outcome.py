"""What comes out of a step: for the scheduler, and from it."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headrace.core.events import FinishReason
from headrace.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a completed step brought.

    Attributes:
        tokens: new tokens of each sequence whose chunk sampled.
        seconds: how long the step took.
        errors: sequences that cannot go on, with the reason.
        attention_s: of `seconds`, those in attention; 0 where they are not known.
    """

    tokens: Mapping[str, Seq[int]]
    seconds: float = 0.0
    errors: Mapping[str, str] = field(default_factory=dict)
    attention_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What became of a sequence in a completed step.

    Attributes:
        seq: the sequence.
        tokens: tokens it gained.
        finish: why it ended, if it did.
        stop_token: the token id that ended it, where one did.
        error: the reason, with finish `error`.
    """

    seq: Sequence
    tokens: Seq[int] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A stored prefix that an admitted sequence is to get.

    Attributes:
        seq: the sequence.
        start: its first token to load, a multiple of the page size; those before it are in the pool.
        end: the token after the last, the end of a stored chunk.
        counts: whether its tokens are hits: at the first admission they are.
    """

    seq: Sequence
    start: int
    end: int
    counts: bool


def split(total: int, shares: Mapping[str, int]) -> dict[str, int]:
    """`total` in whole numbers in the proportion of `shares`, adding up; empty without any."""
    whole = sum(shares.values())
    parts, before, given = {}, 0, 0
    for name, share in shares.items():
        before += share
        upto = total * before // whole if whole else 0
        if upto > given:
            parts[name] = upto - given
        given = upto
    return parts


@dataclass(slots=True)
class Counters:
    """Totals since the start (see `core.events.EngineStats`)."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    hits_by_source: dict[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    abandoned: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    memory_seconds: float = 0.0
    attention_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
