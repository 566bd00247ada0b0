"""Runs one job to its end: validate, generate, write, and the orderly ways to stop before."""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import EngineDead
from headrace.core.request import OFFLINE_SHARE
from headrace.offline.jobs.closing import close_lines
from headrace.offline.jobs.device import Orders
from headrace.offline.jobs.endpoint import Endpoint, check_model
from headrace.offline.jobs.errors import JobError, WrongFile
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.generation import Generation
from headrace.offline.jobs.journal import Journal
from headrace.offline.jobs.lines import MAX_LINE, MAX_LINES, check_file
from headrace.offline.jobs.optimum import Optimum
from headrace.offline.jobs.pending_lines import PendingLines
from headrace.offline.jobs.progress import Pace, Progress
from headrace.offline.jobs.results import ResultFiles
from headrace.offline.jobs.spec import Ending, JobSpec, JobState
from headrace.offline.jobs.spool import job_requests
from headrace.offline.jobs.urgency import share_of
from headrace.offline.jobs.validate import Validation
from headrace.offline.planning.requests import JobRequests

FLUSH_SECONDS = 0.5

#: Makes the results of a job, which lie where its spec says, known.
Publish = Callable[[JobSpec, JobState], None]


class Stopped(Exception):
    """The job was told to let go; what runs it may go on later."""


class JobRunner:
    """Runs one job; made anew for every attempt.

    Args:
        folder: of the job.
        endpoint: what bodies mean, and the engine.
        orders: makes the policy that hands the job's requests to the endpoint's workers.
        windows: requests in flight at most, on each worker.
        optimum: makes what says how long the work takes at best.
        limit: bytes a line may have.
        pause: see `Validation`.
        tell: called after every commit.
        publish: called once all results are in their files, before the job's end can be seen; again after a crash.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: JobFolder,
        endpoint: Endpoint,
        orders: Orders,
        *,
        windows: Sequence[int],
        optimum: Callable[[JobRequests], Optimum | None] = lambda requests: None,
        limit: int = MAX_LINE,
        pause: float = 0.0,
        tell: Callable[[Progress], None] = lambda progress: None,
        publish: Publish = lambda spec, state: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._endpoint, self._orders = folder, endpoint, orders
        self._windows, self._limit, self._pause = tuple(windows), limit, pause
        self._tell, self._publish, self._clock = tell, publish, clock
        self._make_optimum = optimum
        self._optimum: Optimum | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._ending: Ending | None = None
        self._generation: Generation | None = None
        #: What this attempt ran: its requests, and the tokens that each has produced (0: it has not ended).
        self.requests: JobRequests | None = None
        self.lengths: NDArray[np.int32] = np.zeros(0, np.int32)
        self._pace: Pace | None = None
        self._begun = self._earlier = 0.0
        self.share = OFFLINE_SHARE

    def stop(self) -> None:
        """Let go: what is finished is kept, the rest is for a later attempt. `run` then raises `Stopped`."""
        self._stopping = True
        self._wake.set()

    def look(self) -> None:
        """Look now whether the job was cancelled, rather than within `FLUSH_SECONDS`."""
        self._wake.set()

    @property
    def job(self) -> str:
        """Its id."""
        return self._folder.id

    async def run(self) -> JobState:
        """Take the job to its end.

        Returns:
            Its last state: completed, failed, expired or cancelled.

        Raises:
            Stopped: after `stop`.
            JobBusy: another process runs it.
            JobError: its files cannot be read or written any more; it may be resumed once they can.
            EngineDead: the engine has ended; it may be resumed with another.
        """
        try:
            with self._folder.lock():
                journal = self._folder.journal()
                try:
                    if not journal.state.final:
                        await self._attempt(journal)
                    return journal.state
                finally:
                    journal.close()
        except (OSError, sqlite3.Error) as error:
            said = str(error)
            if isinstance(error, OSError) and error.strerror:
                said = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
            hint = f"`headrace batch resume {self._folder.id}` goes on"
            raise JobError(f"job {self._folder.id} stopped: {said}; {hint}") from error

    async def _attempt(self, journal: Journal) -> None:
        state = journal.state
        self._begun, self._earlier = time.monotonic(), state.seconds
        files = ResultFiles(journal)
        try:
            if not state.validated:
                try:
                    await self._validate(journal, files)
                except WrongFile as error:
                    state.reason = str(error)
                    state.enter("failed", self._clock())
                    await asyncio.to_thread(files.flush)
            if state.status in ("in_progress", "cancelling"):
                await self._generate(journal, files)
            if state.status == "finalizing":
                await asyncio.to_thread(self._finish, journal, files)
        finally:
            files.close()
        self._report(journal)

    async def _validate(self, journal: Journal, files: ResultFiles) -> None:
        """Read and check every line."""
        state = journal.state
        self._look(journal)
        try:
            os.close(os.open(journal.spec.input, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            gone = f"cannot read {journal.spec.input}: {error.strerror}"
            if self._ending is None:
                raise JobError(f"{gone}; put it back, and `headrace batch resume {self._folder.id}` goes on") from error
            state.reason = f"{gone}; lines behind the first {state.total} have no result"
            self._validated(state)
            return
        most = MAX_LINES if journal.spec.origin == "server" else None
        await asyncio.to_thread(check_file, Path(journal.spec.input), "the input file", most)
        if self._ending is None:
            check_model(journal, self._endpoint)

        def tell() -> None:
            self._look(journal)
            self._report(journal)
            if self._stopping:
                raise Stopped

        await Validation(self._folder, journal, files, self._endpoint, self._limit, self._pause).run(tell)
        self._validated(state)
        await asyncio.to_thread(files.flush)

    def _validated(self, state: JobState) -> None:
        if state.status == "cancelling":
            state.times["in_progress"] = self._clock()
        else:
            state.enter("in_progress", self._clock())

    async def _generate(self, journal: Journal, files: ResultFiles) -> None:
        """Run what is pending, in the order of the policy."""
        self._look(journal)
        if self._ending is None:
            check_model(journal, self._endpoint)
            await self._run_pending(journal, files)
        self._account(journal.state)
        # Also waits for a flush under way: it commits the state as it finds it, and must not find the ending yet.
        await asyncio.to_thread(files.flush)
        journal.state.ending = self._ending or "completed"
        journal.state.enter("finalizing", self._clock())
        await asyncio.to_thread(files.flush)

    async def _run_pending(self, journal: Journal, files: ResultFiles) -> None:
        columns = await asyncio.to_thread(journal.columns)
        requests = await asyncio.to_thread(job_requests, self._folder, journal, columns)
        self.requests, self.lengths = requests, np.zeros(len(requests), np.int32)
        fleet = await asyncio.to_thread(self._orders, requests)
        self._optimum = await asyncio.to_thread(self._make_optimum, requests)
        self._pace = Pace(int(columns.prompt.sum()), int(columns.most.sum(dtype="int64")))
        lines = PendingLines(journal, columns, self._limit)
        self._begun = time.monotonic()

        def finished(index: int, output_tokens: int) -> None:
            self._finished(index, int(columns.prompt[index]), int(columns.most[index]), output_tokens)

        generation = self._generation = Generation(
            lines, self._endpoint, fleet, self._windows, files, lambda: self.share, finished
        )
        keeper = asyncio.create_task(self._keep(journal, files, generation))
        try:
            await generation.run(keeper)
        except EngineDead:
            await asyncio.to_thread(files.flush)
            raise
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await generation.cancel()
            await lines.close()

    def _finished(self, index: int, prompt: int, most: int, output_tokens: int) -> None:
        """A line has its result."""
        self.lengths[index] = output_tokens
        if self._optimum is not None:
            self._optimum.finish(index, output_tokens)
        if self._pace is not None:
            self._pace.finish(prompt, most, output_tokens)

    async def _keep(self, journal: Journal, files: ResultFiles, generation: Generation) -> None:
        """Commit now and then, and end the job where it is cancelled, expired or stopped; returns when it is."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            self._account(journal.state)
            self._look(journal)
            self._hurry(journal)
            generation.tell_progress()
            await asyncio.to_thread(files.flush)
            self._report(journal)
            if self._stopping:
                raise Stopped
            if self._ending is not None:
                return

    def _hurry(self, journal: Journal) -> None:
        """When the job will end, and what share it needs for that."""
        now, expires = self._clock(), journal.spec.expires_at
        rest = None if self._pace is None else self._pace.rest(time.monotonic() - self._begun)
        if rest is not None:
            journal.state.predicted_end = now + rest
        self.share = share_of(rest, None if expires is None else expires - now)

    def _look(self, journal: Journal) -> None:
        """Whether the job was cancelled from outside, or its time is up."""
        state, expires = journal.state, journal.spec.expires_at
        if self._ending is None and journal.cancel_wanted:
            self._ending = "cancelled"
            state.enter("cancelling", self._clock())
        elif self._ending is None and expires is not None and self._clock() >= expires:
            self._ending = "expired"

    def _finish(self, journal: Journal, files: ResultFiles) -> None:
        """Say of every line that has no result why, and close the job."""
        state = journal.state
        close_lines(journal, files, self._endpoint.urls, self._limit)
        self._publish(journal.spec, state)
        state.enter(state.ending or "completed", self._clock())
        files.flush()
        self._folder.tidy(journal.spec)
        if not state.error_bytes:
            Path(journal.spec.errors).unlink(missing_ok=True)

    def _best(self) -> float:
        """Seconds that what has finished takes at best, all workers together."""
        return 0.0 if self._optimum is None else self._optimum.seconds / len(self._windows)

    def _account(self, state: JobState) -> None:
        state.seconds = self._earlier + time.monotonic() - self._begun

    def _report(self, journal: Journal) -> None:
        state, pace = journal.state, self._pace
        passed = time.monotonic() - self._begun
        rest = None if pace is None else pace.rest(passed)
        self._tell(
            Progress(
                state.status,
                state.total,
                state.completed,
                state.failed,
                0 if self._generation is None else self._generation.running,
                state.prompt_tokens,
                state.cached_tokens,
                state.output_tokens,
                round(state.seconds, 3),
                round((0 if pace is None else pace.tokens) / max(passed, 1e-9), 1),
                None if rest is None else round(rest, 1),
                None
                if self._optimum is None
                else round(self._optimum.seconds / len(self._windows) / max(passed, 1e-9), 4),
            )
        )
