"""How long a sequence waits for chunks that another engine is computing. A policy: pure, time is an argument.

Whoever waits as long as computing would take has lost, at worst, as much again: the rule of renting skis until they
have cost what buying does (Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching", Algorithmica 1988).
"""

#: Beyond the time to compute, for what a chunk needs from its last layer to the tier; at most this share of that time.
SLACK_SECONDS, SLACK_SHARE = 0.25, 0.25
#: Seconds between two looks for what has come; all sequences that wait are looked after together, so many at a time.
LOOK_SECONDS, LOOKS = 0.02, 4


def patience(compute: float) -> float:
    """Seconds that a sequence waits in all before it computes what has not come.

    Args:
        compute: seconds it would take to compute all that is missing when the waiting begins.
    """
    return compute + min(SLACK_SECONDS, SLACK_SHARE * compute)
