"""What the read pool hands out: units, attempts at them, and how these end."""

from enum import Enum
from typing import Generic, TypeVar

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


class ReadUnit(Generic[What]):
    """Something to be read at once.

    Attributes:
        owner: number of the load it belongs to.
        holders: bit t is set when tier t has it.
        order: place within its batch, lowest first: the layer.
        nbytes: bytes to read.
        what: the reader's own; means nothing here.
    """

    __slots__ = ("allowed", "attempts", "failed", "holders", "nbytes", "order", "owner", "rank", "state", "what")

    def __init__(self, owner: int, holders: int, order: int, nbytes: int, what: What) -> None:
        self.owner = owner
        self.holders = holders
        self.order = order
        self.nbytes = nbytes
        self.what = what
        self.state = State.PENDING
        self.failed = 0  # tiers that could not
        self.attempts: list[Attempt[What]] | None = None
        self.allowed: int  # tiers that may take it; names the heap it is in
        self.rank: Rank


class Attempt(Generic[What]):
    """A unit given to a tier, until `finish`."""

    __slots__ = ("expected", "hedge", "over", "started", "tier", "unit")

    def __init__(self, unit: ReadUnit[What], tier: int, started: float, expected: float, hedge: bool) -> None:
        self.unit = unit
        self.tier = tier
        self.started = started
        self.expected = expected
        self.hedge = hedge
        self.over = False

    def remaining(self, now: float) -> float:
        """Seconds until it ends: what is left of what was expected; once that is over, as long as it is overdue."""
        return abs(self.expected - (now - self.started))
