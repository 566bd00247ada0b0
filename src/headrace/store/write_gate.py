"""When writes may flow: while a forward pass runs or the engine is idle, and never ahead of reads."""

import threading
import time
from collections.abc import Callable

#: Seconds after which a write that waits for reads looks whether it is forced.
LOOK_AGAIN = 0.1


class WriteGate:
    """Asked between slices of a few MiB, so that a write gives way within milliseconds.

    Between two forward passes (scheduling, sampling, waiting for loads) nothing is written. An engine that begins no
    pass for `idle_seconds` is idle.

    Args:
        wait_quiet: returns once no read is pending, or after so many seconds; True when none is.
        idle_seconds: see above.
    """

    def __init__(self, wait_quiet: Callable[[float], bool], idle_seconds: float) -> None:
        self._wait_quiet = wait_quiet
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

    def force(self, on: bool) -> None:
        """Let writes through whatever the engine and the reads do, until taken back as often."""
        with self._changed:
            self._forced += 1 if on else -1
            self._changed.notify_all()

    def wait(self) -> None:
        """Return once writes may flow."""
        while True:
            with self._changed:
                while not self._forced and not self._running:
                    idle_in = self._ended + self._idle_seconds - time.monotonic()
                    if idle_in <= 0:
                        break
                    self._changed.wait(idle_in)
                if self._forced:
                    return
            if self._wait_quiet(LOOK_AGAIN):
                return
