"""What the steps of a run were made of: a row for each, in a file, as the engines report them."""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.core.events import EngineStats

#: float64 each. `compute_s` and `memory_s` are what the device's profile says of the step, the other seconds measured;
#: `time_s` is the end of the step, from the beginning of the record.
COLUMNS = ("time_s", "worker", "steps", "step_s", "compute_s", "memory_s", "attention_s", "rows", "outputs")
BUFFERED = 512
_ROW = 8 * len(COLUMNS)  # bytes

log = logging.getLogger(__name__)


class StepRecord:
    """Appends rows to a file; at most `BUFFERED` of them wait in memory.

    What cannot be written ends the record and nothing else: engines call `flush` while they tell of their steps.

    Args:
        path: of the file, begun anew with the first rows: whoever has none to write leaves it as it is.
        clock: seconds that never run backwards.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._written = 0  # bytes
        self._ended = False
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
        """Write what waits; raises nothing."""
        rows, self._rows = self._rows, []
        if not rows or self._ended:
            return
        data = np.array(rows, np.float64).tobytes()
        try:
            written = os.write(self._open(), data)
        except OSError as error:
            self._end(str(error))
            return
        self._written += written
        if written < len(data):
            self._end("there is no room for all of it")

    def close(self) -> None:
        """Write what waits and let go of the file."""
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor

    def _end(self, reason: str) -> None:
        """Record no more; the whole rows that are written stay."""
        self._ended = True
        if self._descriptor is not None:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._written // _ROW * _ROW)
        log.warning("%s is written no further, the run goes on: %s", self._path, reason)


def read_record(path: Path) -> dict[str, NDArray[np.float64]]:
    """The columns of a record, empty ones where no step was recorded; a row that a crash has cut off is left out.

    Raises:
        OSError: it cannot be read.
    """
    flat = np.fromfile(path, np.float64) if path.exists() else np.empty(0, np.float64)
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
