"""The numbers of one attempt: how long it ran, what it did in that time, what is left of it and how urgent that is."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.core.request import OFFLINE_SHARE
from headrace.offline.jobs.journal import Journal
from headrace.offline.jobs.optimum import Optimum
from headrace.offline.jobs.progress import Pace, Progress
from headrace.offline.jobs.urgency import share_of
from headrace.offline.planning.requests import JobRequests


class Account:
    """Counts from when it is made.

    Args:
        journal: of the job.
        requests: that the attempt runs; None: it is not known yet, and no time counts.
        optimum: of these requests; None: not known.
        workers: engines that share the job.
        clock: seconds since the epoch.

    Attributes:
        lengths: tokens that each request has produced; 0: it has not ended, or was refused.
        share: of a step with online requests that the job may take now.
    """

    def __init__(
        self,
        journal: Journal,
        requests: JobRequests | None = None,
        optimum: Optimum | None = None,
        workers: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spec, self._state = journal.spec, journal.state
        self._begun, self._earlier = time.monotonic(), self._state.seconds
        self._optimum, self._workers, self._clock = optimum, workers, clock
        self._prompts = np.zeros(0, np.int64) if requests is None else requests.prompt_lengths
        self._most = np.zeros(0, np.int32) if requests is None else requests.max_tokens
        self._pace = Pace(int(self._prompts.sum()), int(self._most.sum(dtype=np.int64)))
        self.lengths: NDArray[np.int32] = np.zeros(len(self._most), np.int32)
        self.share = OFFLINE_SHARE

    def finish(self, index: int, output_tokens: int) -> None:
        """A request has ended with so many tokens; none: it was refused."""
        self.lengths[index] = output_tokens
        if self._optimum is not None:
            self._optimum.finish(index, output_tokens)
        self._pace.finish(int(self._prompts[index]), int(self._most[index]), output_tokens)

    def note(self) -> None:
        """Bring up to date what the job's state says of time, and the share that the job needs to be done in time."""
        state, now, expires = self._state, self._clock(), self._spec.expires_at
        passed = time.monotonic() - self._begun
        state.seconds = self._earlier + passed
        rest = self._pace.rest(passed)
        if rest is not None:
            state.predicted_end = now + rest
        self.share = share_of(rest, None if expires is None else expires - now)

    def progress(self, running: int) -> Progress:
        """How far the job is, by the last `note`.

        Args:
            running: requests that are being generated.
        """
        state, passed = self._state, self._state.seconds - self._earlier
        rest = self._pace.rest(passed)
        least = None if self._optimum is None else self._optimum.seconds / self._workers
        return Progress(
            state.status,
            state.total,
            state.completed,
            state.failed,
            running,
            state.prompt_tokens,
            state.cached_tokens,
            state.output_tokens,
            round(state.seconds, 3),
            round(self._pace.tokens / max(passed, 1e-9), 1),
            None if rest is None else round(rest, 1),
            None if least is None else round(least / max(passed, 1e-9), 4),
        )
