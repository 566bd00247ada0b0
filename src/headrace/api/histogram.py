"""Counters and histograms in Prometheus' text format; single-threaded, so an observation costs no lock."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class Histogram:
    """Counts of observations by upper bound.

    Args:
        name: full metric name.
        help: one line.
        bounds: ascending upper bounds; +Inf is implied.
    """

    def __init__(self, name: str, help: str, bounds: Iterable[float]) -> None:
        self.name = name
        self.help = help
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` over."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def lines(self, labels: Labels) -> list[str]:
        """The exposition lines of this metric."""
        out = _head(self.name, self.help, "histogram")
        total = 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            out.append(f"{self.name}_bucket{_labels({**labels, 'le': bound})} {total}")
        out.append(f"{self.name}_sum{_labels(labels)} {self._sum!r}")
        out.append(f"{self.name}_count{_labels(labels)} {total}")
        return out


class Counter:
    """A number per set of label values that only grows.

    Args:
        name: full metric name, ending in `_total`.
        help: one line.
        label_names: labels besides the common ones.
    """

    def __init__(self, name: str, help: str, label_names: tuple[str, ...] = ()) -> None:
        self.name = name
        self.help = help
        self.label_names = label_names
        self._values: dict[tuple[str, ...], float] = {} if label_names else {(): 0}

    def add(self, *label_values: str, amount: float = 1) -> None:
        """Grow by `amount`."""
        self._values[label_values] = self._values.get(label_values, 0) + amount

    def lines(self, labels: Labels) -> list[str]:
        """The exposition lines of this metric."""
        out = _head(self.name, self.help, "counter")
        for values, number in sorted(self._values.items()):
            out.append(f"{self.name}{_labels({**labels, **dict(zip(self.label_names, values))})} {number!r}")
        return out


def sample(name: str, help: str, kind: str, value: float, labels: Labels) -> list[str]:
    """One gauge or counter whose value is known elsewhere."""
    return [*_head(name, help, kind), f"{name}{_labels(labels)} {value!r}"]


def _head(name: str, help: str, kind: str) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
