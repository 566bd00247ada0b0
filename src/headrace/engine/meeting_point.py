"""Recompute as one more tier: the model takes a stored prefix from the front, storage from the back. A policy: pure.

Where the clocks say that both will meet, the prefix is split. Chunks well behind that point are storage's, read
layer-major; those near it are read chunk by chunk from the back, and only these may change hands: whenever the model
comes to one that storage would need longer to reach than the model needs to compute it, the model takes it. The split
is ours; no paper has it.
"""

from collections.abc import Sequence
from typing import NamedTuple

#: A split must spare storage this share of the chunks. Below it loading is clearly faster, and nothing is computed.
WORTH = 0.2
#: Chunks on either side of the meeting point that may change hands, as a share of all: how wrong predictions may be.
BAND = 0.25


class Split(NamedTuple):
    """Who gets which chunks.

    Attributes:
        first: chunks before this one are the model's.
        sure: chunks from this one on are storage's; those in between may change hands.
    """

    first: int
    sure: int


def meeting_point(compute: Sequence[float], load: float) -> int:
    """How many chunks the model has computed from the front when storage has loaded the rest.

    Args:
        compute: seconds to compute each chunk.
        load: seconds to load one.
    """
    spent = 0.0
    for number, seconds in enumerate(compute):
        spent += seconds
        if spent > (len(compute) - number - 1) * load:
            return number
    return len(compute)


def split(compute: Sequence[float], load: float) -> Split | None:
    """The split of a prefix; None where it is not worth it.

    Args:
        compute: seconds to compute each chunk.
        load: seconds to load one.
    """
    count = len(compute)
    meet = meeting_point(compute, load)
    if meet < 1 or meet < WORTH * count:
        return None
    band = max(1, round(BAND * count))
    return Split(max(0, meet - band), min(count, meet + band))


def takes(compute: float, outstanding: float) -> bool:
    """Whether the model takes the next chunk that may change hands.

    Args:
        compute: seconds to compute it.
        outstanding: seconds that storage needs for all that has not come yet, this chunk last.
    """
    return compute < outstanding
