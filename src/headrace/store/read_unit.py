"""What the read pool hands out: units, attempts at them, and how these end."""

from enum import Enum
from typing import Generic, TypeVar

from msgspec import Struct

What = TypeVar("What")

#: What comes first: number of the batch (0: hastened), place within it, a running number. Each row has its own.
Rank = tuple[int, int, int]


class State(Enum):
    """Where a unit is."""

    PENDING = "pending"
    READING = "reading"
    WON = "won"
    LOST = "lost"
    CANCELLED = "cancelled"


class Outcome(Enum):
    """How an attempt ended: bytes that are right; somebody else's counted already; a wrong part; a tier that failed."""

    OK = "ok"
    LATE = "late"
    WRONG = "wrong"
    ERROR = "error"


class Verdict(Enum):
    """What an attempt's end means: its bytes count; somebody else's did; others try; nobody can."""

    WON = "won"
    LATE = "late"
    RETRY = "retry"
    LOST = "lost"


class ReadUnit(Struct, Generic[What], eq=False, gc=False):
    """Something to be read at once. A step has a thousand, made while it waits: a `Struct` takes a third of the time.

    The collector does not look at units: what refers to one in a circle (its load, its attempts) lets go of it when it
    ends.

    Attributes:
        owner: number of the load it belongs to.
        holders: bit t is set when tier t has it.
        order: place within its batch, lowest first: the layer.
        nbytes: bytes to read.
        what: the reader's own; means nothing here.
        state: where it is.
        failed: tiers that could not.
        attempts: under way; None before the first.
        allowed: tiers that may take it; names the heap it is in.
        rank: of its row.
    """

    owner: int
    holders: int
    order: int
    nbytes: int
    what: What
    state: State = State.PENDING
    failed: int = 0
    attempts: "list[Attempt[What]] | None" = None
    allowed: int = 0
    rank: Rank = (0, 0, 0)


class Attempt(Struct, Generic[What], eq=False):
    """A unit given to a tier, until `finish`.

    Attributes:
        unit: what is read.
        tier: who reads it.
        started: when, seconds.
        expected: seconds that it should take.
        hedge: another tier was at it already.
        over: it has ended.
    """

    unit: ReadUnit[What]
    tier: int
    started: float
    expected: float
    hedge: bool
    over: bool = False

    def remaining(self, now: float) -> float:
        """Seconds until it ends: what is left of what was expected; once that is over, as long as it is overdue."""
        return abs(self.expected - (now - self.started))
