"""When requests arrive: Gamma-distributed gaps, or the times of a trace."""

import numpy as np

from headrace.core.errors import ConfigError


def gamma_arrivals(count: int, rate: float, cv: float, seed: int = 0) -> list[float]:
    """Arrival times in seconds from the start, ascending.

    Gaps are Gamma-distributed with mean 1/rate and coefficient of variation `cv`: 1 is a Poisson process, above 1
    bursts, 0 a metronome. `rate` infinite: all at once.

    Raises:
        ConfigError: rate or cv is out of range.
    """
    if not rate > 0:
        raise ConfigError(f"--rate must be above 0 requests per second, got {rate}")
    if not 0 <= cv <= 100:
        raise ConfigError(f"--cv must be between 0 and 100, got {cv}")
    if np.isinf(rate):
        return [0.0] * count
    if cv == 0:
        return [i / rate for i in range(count)]
    gaps = np.random.default_rng(seed).gamma(shape=cv**-2, scale=cv**2 / rate, size=count)
    gaps[:1] = 0.0
    return [float(time) for time in np.cumsum(gaps)]
