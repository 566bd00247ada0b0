"""What a client saw of each streamed request, and the summary of many."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.settings import nearest, parse_duration

PERCENTILES = (50, 90, 99)


@dataclass
class Observed:
    """One request as its client saw it; times are seconds on one clock.

    Attributes:
        due: when the request should have been sent (latencies count from here, so a late client hides nothing).
        sent: when it was.
        arrivals: when each piece of output came.
        end: when the stream ended.
        prompt_tokens, output_tokens, cached_tokens: as the server counted them.
        error: what went wrong; None: nothing.
        text: the output.
    """

    due: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    text: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Times between successive pieces of output."""
        return [float(gap) for gap in np.diff(self.arrivals)]

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 with fewer than two tokens."""
        tokens = max(self.output_tokens, len(self.arrivals))
        return (self.arrivals[-1] - self.arrivals[0]) / (tokens - 1) if tokens > 1 else 0.0

    @property
    def e2e(self) -> float:
        """Time from due to done."""
        return self.end - self.due


_SLO_KEYS = ("ttft", "itl", "tpot", "e2e")


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=2s,itl=200ms` as seconds by key: `ttft`, `itl` (99th percentile within a request), `tpot` (mean), `e2e`.

    Raises:
        ConfigError: a key or a duration is wrong.
    """
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, separator, value = part.strip().partition("=")
        if name not in _SLO_KEYS or not separator:
            raise ConfigError(
                f"--slo: {part!r} is not KEY=DURATION with {', '.join(_SLO_KEYS)}{nearest(name, _SLO_KEYS)}"
            )
        try:
            bounds[name] = parse_duration(value)
        except ValueError as error:
            raise ConfigError(f"--slo: {value!r} is not a duration such as 150ms ({error})") from error
    return bounds


def meets(seen: Observed, slo: dict[str, float]) -> bool:
    """True when a request finished within all bounds."""
    if seen.error is not None or not seen.arrivals:
        return False
    gaps = seen.gaps
    values = {
        "ttft": seen.ttft,
        "tpot": seen.tpot,
        "e2e": seen.e2e,
        "itl": float(np.percentile(gaps, 99)) if gaps else 0.0,
    }
    return all(values[name] <= bound for name, bound in slo.items())


def summarise(seen: Sequence[Observed], slo: dict[str, float] | None = None) -> dict[str, Any]:
    """Counts, rates and percentiles of a run as one flat object; latencies in milliseconds."""
    good = [one for one in seen if one.error is None and one.arrivals]
    start = min((one.due for one in seen), default=0.0)
    duration = max((one.end for one in seen), default=0.0) - start
    output, prompt = sum(one.output_tokens for one in good), sum(one.prompt_tokens for one in good)
    result: dict[str, Any] = {
        "requests": len(seen),
        "completed": len(good),
        "failed": len(seen) - len(good),
        "duration_s": round(duration, 3),
        "requests_per_s": _rate(len(good), duration),
        "output_tokens_per_s": _rate(output, duration),
        "total_tokens_per_s": _rate(output + prompt, duration),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(one.cached_tokens for one in good),
    }
    series = {
        "ttft": [one.ttft for one in good],
        "itl": [gap for one in good for gap in one.gaps],
        "tpot": [one.tpot for one in good if one.tpot],
        "e2e": [one.e2e for one in good],
    }
    for name, values in series.items():
        for percent in PERCENTILES:
            value = round(float(np.percentile(values, percent)) * 1000, 2) if values else None
            result[f"{name}_p{percent}_ms"] = value
    result["client_lag_max_ms"] = round(max((one.sent - one.due for one in seen if one.sent), default=0.0) * 1000, 2)
    if slo:
        within = sum(meets(one, slo) for one in seen)
        result |= {"slo_share": round(within / len(seen), 4) if seen else 0.0, "goodput_per_s": _rate(within, duration)}
    errors = Counter(one.error or "the stream held no output" for one in seen if one not in good)
    if errors:
        result["errors"] = dict(errors)
    return result


def _rate(count: int, duration: float) -> float:
    return round(count / duration, 3) if duration > 0 else 0.0
