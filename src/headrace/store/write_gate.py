"""When writes may flow: while a forward pass runs or the engine is idle, and never ahead of reads."""

import threading
import time
from collections.abc import Callable


class WriteGate:
    """Asked between slices of a few MiB, so that a write gives way within milliseconds.

    Between two forward passes (scheduling, sampling, waiting for loads) nothing is written. An engine that begins no
    pass for `idle_seconds` is idle.

    Args:
        reading: whether reads are pending; whoever ends the last one calls `reads_ended`.
        idle_seconds: see above.
    """

    def __init__(self, reading: Callable[[], bool], idle_seconds: float) -> None:
        self._reading = reading
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        self._running = False
        self._ended = float("-inf")
        self._forced = 0

    def forward(self, running: bool) -> None:
        """A forward pass begins or ends."""
        with self._changed:
            if self._running and not running:
                self._ended = time.monotonic()
            self._running = running
            if running:
                self._changed.notify_all()

    def reads_ended(self) -> None:
        """No read is pending any more."""
        with self._changed:
            self._changed.notify_all()

    def force(self, on: bool) -> None:
        """Let writes through whatever the engine and the reads do, until taken back as often."""
        with self._changed:
            self._forced += 1 if on else -1
            self._changed.notify_all()

    def wait(self) -> None:
        """Return once writes may flow."""
        with self._changed:
            while not self._forced:
                wait = None
                if not self._reading():
                    if self._running:
                        return
                    wait = self._ended + self._idle_seconds - time.monotonic()
                    if wait <= 0:
                        return
                self._changed.wait(wait)
