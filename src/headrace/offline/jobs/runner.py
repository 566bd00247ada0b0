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
from headrace.offline.jobs.account import Account
from headrace.offline.jobs.closing import close_lines
from headrace.offline.jobs.device import Orders
from headrace.offline.jobs.endpoint import Endpoint, check_model
from headrace.offline.jobs.errors import JobError, WrongFile, reason_of
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.generation import Generation
from headrace.offline.jobs.journal import Journal
from headrace.offline.jobs.lines import MAX_LINE, MAX_LINES, check_file
from headrace.offline.jobs.optimum import Optimum
from headrace.offline.jobs.pending_lines import PendingLines
from headrace.offline.jobs.progress import Progress
from headrace.offline.jobs.results import ResultFiles
from headrace.offline.jobs.spec import JobSpec, JobState
from headrace.offline.jobs.spool import job_requests
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
        self._wake = asyncio.Event()
        self._stopping = False
        self._generation: Generation | None = None
        self._account: Account | None = None
        #: What this attempt ran.
        self.requests: JobRequests | None = None

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

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens that each of `requests` has produced; 0: it has not ended, or was refused."""
        return np.zeros(0, np.int32) if self._account is None else self._account.lengths

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
                journal = await asyncio.to_thread(self._folder.journal)
                try:
                    if not journal.state.final:
                        await self._attempt(journal)
                    return journal.state
                finally:
                    await asyncio.to_thread(journal.close)
        except (OSError, sqlite3.Error) as error:
            hint = f"`headrace batch resume {self._folder.id}` goes on"
            raise JobError(f"job {self._folder.id} stopped: {reason_of(error)}; {hint}") from error

    async def _attempt(self, journal: Journal) -> None:
        state = journal.state
        self._account = Account(journal)
        files = await asyncio.to_thread(ResultFiles, journal)
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
            await asyncio.to_thread(files.close)
        self._report()

    async def _validate(self, journal: Journal, files: ResultFiles) -> None:
        """Read and check every line."""
        state = journal.state
        self._look(journal)
        try:
            os.close(os.open(journal.spec.input, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            gone = f"cannot read {journal.spec.input}: {error.strerror}"
            if state.ending is None:
                raise JobError(f"{gone}; put it back, and `headrace batch resume {self._folder.id}` goes on") from error
            state.reason = f"{gone}; lines behind the first {state.total} have no result"
            self._validated(state)
            return
        most = MAX_LINES if journal.spec.origin == "server" else None
        await asyncio.to_thread(check_file, Path(journal.spec.input), "the input file", most)
        if state.ending is None:
            check_model(journal, self._endpoint)

        def tell() -> None:
            self._look(journal)
            self._report()
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
        state = journal.state
        self._look(journal)
        if state.ending is None:
            check_model(journal, self._endpoint)
            await self._run_pending(journal, files)
        # Also waits for a flush under way: it commits the state as it finds it, and must not find `finalizing` yet.
        await asyncio.to_thread(files.flush)
        if state.ending is None or (state.ending == "expired" and not await asyncio.to_thread(journal.pending, 1)):
            state.ending = "completed"
        state.enter("finalizing", self._clock())
        await asyncio.to_thread(files.flush)

    async def _run_pending(self, journal: Journal, files: ResultFiles) -> None:
        columns = await asyncio.to_thread(journal.columns)
        requests = self.requests = await asyncio.to_thread(job_requests, self._folder, journal, columns)
        fleet = await asyncio.to_thread(self._orders, requests)
        optimum = await asyncio.to_thread(self._make_optimum, requests)
        lines = PendingLines(journal, columns, self._limit)
        account = self._account = Account(journal, requests, optimum, len(self._windows), self._clock)
        generation = self._generation = Generation(
            lines, self._endpoint, fleet, self._windows, files, lambda: account.share, account.finish
        )
        keeper = asyncio.create_task(self._keep(journal, files, generation, account))
        try:
            await generation.run(keeper)
        except (EngineDead, Stopped):
            account.note()
            await asyncio.to_thread(files.flush)
            raise
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await generation.cancel()
            await lines.close()
        account.note()

    async def _keep(self, journal: Journal, files: ResultFiles, generation: Generation, account: Account) -> None:
        """Commit now and then, and end the job where it is cancelled, expired or stopped; returns when it is."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            if self._stopping:
                raise Stopped
            generation.tell_progress()
            account.note()
            await asyncio.to_thread(files.flush)
            self._look(journal)
            self._report()
            if journal.state.ending is not None:
                return

    def _look(self, journal: Journal) -> None:
        """Whether the job was cancelled from outside, or its time is up; setting the clock back undoes neither."""
        state, expires = journal.state, journal.spec.expires_at
        if state.ending is None and journal.cancel_wanted:
            state.ending = "cancelled"
            state.enter("cancelling", self._clock())
        elif state.ending is None and expires is not None and self._clock() >= expires:
            state.ending = "expired"

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

    def _report(self) -> None:
        if self._account is not None:
            self._tell(self._account.progress(0 if self._generation is None else self._generation.running))
