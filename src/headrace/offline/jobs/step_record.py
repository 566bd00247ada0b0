"""What the steps of a run were made of: a row for each, in a file, as the engines report them."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.core.events import EngineStats

#: float64 each. `compute_s` and `memory_s` are what the device's profile says of the step, the other seconds measured;
#: `time_s` is the end of the step, from the beginning of the record.
COLUMNS = ("time_s", "worker", "steps", "step_s", "compute_s", "memory_s", "attention_s", "rows", "outputs")
BUFFERED = 512


class StepRecord:
    """Appends rows to a file; at most `BUFFERED` of them wait in memory.

    Args:
        path: of the file, begun anew.
        clock: seconds that never run backwards.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._clock = clock
        self._begun = clock()
        self._rows: list[tuple[float, ...]] = []
        self._last: dict[int, tuple[float, ...]] = {}

    def observer(self, worker: int, stats: EngineStats) -> Callable[[EngineStats], None]:
        """What an engine's statistics are to be told to after every step.

        Args:
            worker: its number.
            stats: the engine's counters now.
        """
        self._last[worker] = _counters(stats)

        def observe(stats: EngineStats) -> None:
            now = _counters(stats)
            grown = [value - before for value, before in zip(now, self._last[worker])]
            self._last[worker] = now
            if grown[0] > 0:
                self._rows.append((self._clock() - self._begun, float(worker), *grown))
                if len(self._rows) >= BUFFERED:
                    self.flush()

        return observe

    def flush(self) -> None:
        """Write what waits."""
        os.write(self._descriptor, np.array(self._rows, np.float64).tobytes())
        self._rows.clear()

    def close(self) -> None:
        """Write what waits and let go of the file."""
        self.flush()
        os.close(self._descriptor)


def read_record(path: Path) -> dict[str, NDArray[np.float64]]:
    """The columns of a record; a row that was cut off by a crash is left out.

    Raises:
        OSError: there is none.
    """
    flat = np.fromfile(path, np.float64)
    rows = flat[: len(flat) // len(COLUMNS) * len(COLUMNS)].reshape(-1, len(COLUMNS))
    return {name: rows[:, number] for number, name in enumerate(COLUMNS)}


def _counters(stats: EngineStats) -> tuple[float, ...]:
    return (
        float(stats.steps_total),
        stats.step_seconds_total,
        stats.compute_seconds_total,
        stats.memory_seconds_total,
        stats.attention_seconds_total,
        float(stats.computed_tokens_total),
        float(stats.output_tokens_total),
    )
