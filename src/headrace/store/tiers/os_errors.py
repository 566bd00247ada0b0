"""What the operating system's errors mean for a tier."""

import errno

from headrace.store.tiers.tier import TierError, TierFull

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def tier_error(tier: str, doing: str, error: OSError) -> TierError:
    """The error to raise for an error of the system.

    Args:
        tier: the tier's name.
        doing: what was tried, e.g. `writing <part>`.
        error: what came of it.
    """
    kind = TierFull if error.errno in _NO_ROOM else TierError
    return kind(f"tier {tier}: {doing} failed: {error.strerror or error}")
