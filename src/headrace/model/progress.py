"""How the hub tells its callers what it is doing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["download", "convert"]


@dataclass(frozen=True, slots=True)
class Progress:
    """State of one phase of fetching a model.

    Attributes:
        phase: fetching bytes over the network, or converting them on this machine.
        done: bytes (download) or tensors and files (convert) finished so far.
        total: of how many; 0 while unknown.
        seconds: time this phase has taken so far.
        finished: True in the last report of the phase.
    """

    phase: Phase
    done: int
    total: int
    seconds: float
    finished: bool = False


ProgressCallback = Callable[[Progress], None]
