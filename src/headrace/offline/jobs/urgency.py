"""How much of a step with online tokens a job may take, by how much time it has left. A policy."""

from headrace.core.request import OFFLINE_SHARE

#: A prompt beside a job then takes at most 1.4 times its own time: below the 1.5 that online requests are promised.
MOST_SHARE = 0.4
#: Up to this part of the time that is left, the rest of a job is in no hurry.
CALM = 0.8


def share_of(rest: float | None, left: float | None) -> float:
    """The share of a job's requests (see `core.request.Request.share`).

    Args:
        rest: seconds that the job is expected to take still; None: not known.
        left: seconds until its window closes; None: it has none.
    """
    if rest is None or left is None:
        return OFFLINE_SHARE
    if left <= 0:
        return MOST_SHARE
    haste = (rest / left - CALM) / (1 - CALM)
    return OFFLINE_SHARE + (MOST_SHARE - OFFLINE_SHARE) * min(1.0, max(0.0, haste))
