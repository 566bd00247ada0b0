"""How memory is divided between the two ends of a scan, and what a set of running requests will need."""

import numpy as np

from headrace.offline.planning.tree import Floats


def memory_split(memory: float, left: float, right: float, whole: float) -> tuple[float, float]:
    """`M_L, M_R` with `M_L + M_R = M` and `rho_L M_L + rho_R M_R = rho M` (BlendServe, dual scan).

    A token of KV that stays resident costs the same reading time on either side, so densities average by memory.

    Args:
        memory: M, in any unit.
        left, right: densities of what stands at the compute-heavy and at the memory-heavy end.
        whole: density to reach, that of all that is left.

    Returns:
        The two shares. Where the equations have no answer (own): equal densities give half each; a density outside of
        what the ends can mix gives all to the nearer end.
    """
    if not np.isfinite(left) or not np.isfinite(whole):
        # Nothing is read on the left (or at all): compute comes with any memory.
        share = 0.5 if not np.isfinite(whole) else 0.0
    elif left - right <= 1e-9 * max(abs(left), abs(right)):
        share = 0.5
    else:
        share = min(1.0, max(0.0, (whole - right) / (left - right)))
    return share * memory, (1 - share) * memory


def peak_tokens(current: Floats, left_to_produce: Floats, steps: float = np.inf) -> float:
    """The most tokens that sequences will hold at once, when each gains one a step and leaves when it is done.

    Args:
        current: tokens each holds now.
        left_to_produce: tokens each is still to produce.
        steps: how far to look ahead.

    When the k-th longest-lived one ends after r steps, those that live as long hold what they hold now plus r each; the
    peak is at one of these moments.
    """
    if not len(current):
        return 0.0
    order = np.argsort(-left_to_produce, kind="stable")
    held, ends = np.cumsum(current[order]), np.minimum(left_to_produce[order], steps)
    return float(np.max(held + np.arange(1, len(order) + 1) * ends))
