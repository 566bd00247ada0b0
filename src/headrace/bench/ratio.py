"""Ratios of pairs of measurements, with the interval that repeating them would mostly stay in."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.core.errors import ConfigError

_Z = 1.959964  # 97.5% quantile of the normal distribution


class Ratio(NamedTuple):
    """Geometric mean of the ratios of pairs, and its 95% confidence interval."""

    mean: float
    low: float
    high: float

    def rounded(self) -> list[float]:
        """`[mean, low, high]` for reports."""
        return [round(value, 4) for value in self]


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ratio of pairs measured one after the other; noise that hits both parts of a pair cancels.

    The interval is Student's, of the logarithms of the ratios; with one pair it is unbounded.

    Raises:
        ConfigError: there is no pair.
    """
    if not ours or len(ours) != len(theirs):
        raise ConfigError(f"{len(ours)} and {len(theirs)} measurements make no pairs")
    logs = np.log(np.asarray(ours) / np.asarray(theirs))
    mean, count = float(logs.mean()), len(logs)
    if count == 1:
        return Ratio(float(np.exp(mean)), 0.0, float("inf"))
    half = t_quantile(count - 1) * float(logs.std(ddof=1)) / count**0.5
    return Ratio(float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half)))


def t_quantile(freedom: int) -> float:
    """97.5% quantile of Student's t: Abramowitz and Stegun 26.7.5, within 0.2% from 4 degrees of freedom on."""
    z, n = _Z, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )
