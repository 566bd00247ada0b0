"""Runs the batches of a server, one after another, the one that is due first before the others."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal

from headrace.api.batch_endpoint import BatchEndpoint
from headrace.api.batch_folders import BatchFolders
from headrace.api.batch_making import ORDER, BatchMaker
from headrace.api.batch_queue import BatchQueue, Waiting, rest_of
from headrace.api.batch_request import BatchRequest
from headrace.api.batch_results import publish_results, result_ids
from headrace.api.errors import ApiError
from headrace.api.state import ServerState
from headrace.core.errors import EngineDead, HeadraceError, QueueFull
from headrace.offline.jobs.cancel import close_job
from headrace.offline.jobs.device import fleet_of
from headrace.offline.jobs.errors import JobBusy
from headrace.offline.jobs.folder import JobFolder, list_jobs
from headrace.offline.jobs.progress import Progress
from headrace.offline.jobs.runner import JobRunner, Stopped
from headrace.offline.jobs.spec import JobSpec, JobState

log = logging.getLogger("headrace.api")

MAX_WAITING = 1000  # batches that have not ended
RETRY_S = 10.0
LOOK_S = 10.0  # how soon it is seen that a command has cancelled a batch that waits
SWEEP_S = 600.0  # how long an expired file lies on the disk still
LONGEST_TIMER_S = 86400.0 * 40
PAUSE = 1.0  # validation leaves as much time to the front's other work as it takes

#: How an attempt went: to its end, let go in favour of another batch or of the server's end, or it could not go on.
Attempt = Literal["ended", "let go", "failed"]


class BatchService:
    """See above.

    Args:
        state: the server's.
        clock: seconds since the epoch.
    """

    def __init__(self, state: ServerState, clock: Callable[[], float] = time.time) -> None:
        self._state = state
        self._clock = clock
        self._endpoint = BatchEndpoint(state)
        self._maker = BatchMaker(state, self._endpoint, clock)
        self._queue = BatchQueue()
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._arrived = asyncio.Event()
        self._creating = asyncio.Lock()  # what looking at an input takes is taken once
        self._runner: JobRunner | None = None
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        self.folders = BatchFolders(state.jobs)

    async def resume(self) -> None:
        """Take up the batches that servers left unfinished."""
        for batch in await asyncio.to_thread(self._unfinished):
            self._add(batch)
        self._start()

    async def create(self, asked: BatchRequest) -> JobFolder:
        """Make a batch of what has been checked, and queue it.

        Raises:
            QueueFull: too many have not ended.
            ApiError: the server ends, or the input is gone.
        """
        async with self._creating:
            if self._stopping.is_set():
                raise ApiError(503, "the server is shutting down", "service_unavailable", code="shutting_down")
            if len(self._queue) >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} batches have not ended yet; try again later")
            batch = await self._maker.make(asked, self._queue)
            self._add(batch)
            self._start()
        return batch.folder

    def predicted(self) -> dict[str, float]:
        """When each batch that has not ended is expected to, seconds since the epoch, as far as that is known."""
        return self._queue.ends(self._clock())

    async def cancel(self, folder: JobFolder) -> None:
        """End a batch; returns when that is asked for, or done where nobody runs it.

        Raises:
            ApiError: 409, it has ended already.
        """
        state = await asyncio.to_thread(folder.state)
        if state.status == "cancelled":
            return
        if state.final:
            raise ApiError(409, f"Cannot cancel a batch with status {state.status!r}.", code="batch_not_cancellable")
        await asyncio.to_thread(folder.ask_to_cancel)
        if not self._look_at_running(folder):
            await self._close(folder)

    def stop(self) -> None:
        """Let go of the running batch; it goes on when the next server starts."""
        self._stopping.set()
        self._arrived.set()
        if self._runner is not None:
            self._runner.stop()

    async def close(self) -> None:
        """Stop, and wait until the files are closed."""
        self.stop()
        for expiry in self._expiries.values():
            expiry.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _unfinished(self) -> list[Waiting]:
        """The batches that have not ended; does what servers that died have left undone for the others."""
        files, found = self._state.files, []
        for folder in list_jobs(self._state.jobs):
            try:
                spec, state = folder.spec(), folder.state()
                if spec.origin == "server" and state.final:
                    publish_results(files, spec, state)
                    folder.tidy(spec)
            except (HeadraceError, OSError) as error:
                log.warning("a batch cannot be read", extra={"batch": folder.id, "reason": str(error)})
                continue
            if spec.origin == "server" and not state.final:
                served = spec.fingerprint == self._endpoint.fingerprint
                found.append(Waiting(folder.id, spec.expires_at or math.inf, rest_of(state), folder, served))
        files.sweep_content({each for folder in list_jobs(self._state.jobs) for each in result_ids(folder.id)})
        return found

    def _start(self) -> None:
        if not self._started and not self._stopping.is_set():
            self._started = True
            self._begin(self._work())
            self._begin(self._tend())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _add(self, batch: Waiting) -> None:
        loop = asyncio.get_running_loop()
        wait = max(0.0, min(batch.due - self._clock(), LONGEST_TIMER_S))
        self._expiries[batch.id] = loop.call_later(wait, self._expire, batch)
        self._queue.add(batch)
        self._state.metrics.batches = len(self._queue)
        self._arrived.set()
        self._give_way()

    def _forget(self, job: str) -> None:
        self._queue.remove(job)
        self._state.metrics.batches = len(self._queue)
        expiry = self._expiries.pop(job, None)
        if expiry is not None:
            expiry.cancel()

    async def _work(self) -> None:
        """Run what waits, until `stop`."""
        now = asyncio.get_running_loop().time
        while not self._stopping.is_set():
            self._arrived.clear()
            batch = self._queue.next(now())
            if batch is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._queue.next_try()):
                        await self._arrived.wait()
                continue
            try:
                attempt = await self._run(batch)
            except Exception as error:
                log.exception("a batch failed", exc_info=error, extra={"batch": batch.id})
                attempt = "failed"
            if attempt == "ended":
                self._forget(batch.id)
            elif attempt == "failed":
                batch.not_before = now() + RETRY_S

    def _give_way(self) -> None:
        """Let go of the running batch where another would end too late behind it; it goes on afterwards."""
        if self._runner is not None and self._queue.gives_way(self._clock()):
            self._runner.stop()

    async def _tend(self) -> None:
        """Look after the batches that do not run, and after expired files, until `stop`."""
        swept = -math.inf
        while not self._stopping.is_set():
            try:
                for batch in await asyncio.to_thread(self._over, self._queue.idle):
                    if self._stopping.is_set():
                        break
                    await self._end(batch)
                self._give_way()
                if time.monotonic() - swept >= SWEEP_S:
                    swept = time.monotonic()
                    await asyncio.to_thread(self._state.files.sweep)
            except Exception as error:
                log.exception("batches that wait could not be looked after", exc_info=error)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()

    def _over(self, batches: list[Waiting]) -> list[Waiting]:
        """Those that are to end without having run: cancelled by a command, or their time is up."""
        found = []
        for batch in batches:
            with suppress(HeadraceError):  # a damaged one
                if batch.due <= self._clock() or batch.folder.cancel_wanted:
                    found.append(batch)
        return found

    def _expire(self, batch: Waiting) -> None:
        """The time of a batch is up."""
        if not self._look_at_running(batch.folder) and not self._stopping.is_set():
            self._begin(self._end(batch))

    def _look_at_running(self, folder: JobFolder) -> bool:
        """Whether a batch runs; then it looks whether it is to end."""
        if self._runner is None or self._runner.job != folder.id:
            return False
        self._runner.look()
        return True

    async def _run(self, batch: Waiting) -> Attempt:
        """One attempt."""
        state, device, folder = self._state, await asyncio.to_thread(self._maker.device), batch.folder

        def tell(progress: Progress) -> None:
            batch.rest = batch.rest if progress.eta_s is None else progress.eta_s
            state.metrics.tell_batch(progress)

        runner = self._runner = JobRunner(
            folder,
            self._endpoint,
            fleet_of(ORDER, [device]),
            windows=[device.window],
            optimum=device.optimum,
            limit=state.config.max_request_bytes,
            pause=PAUSE,
            tell=tell,
            publish=self._publish,
            clock=self._clock,
        )
        self._queue.running = batch
        log.info("a batch runs", extra={"batch": folder.id})
        try:
            begun = await asyncio.to_thread(folder.state)
            state.metrics.begin_batch(begun.completed, begun.failed)
            if self._stopping.is_set():
                return "let go"
            last = await runner.run()
            counts = {"completed": last.completed, "failed": last.failed}
            log.info("a batch has ended", extra={"batch": folder.id, "status": last.status, **counts})
        except Stopped:
            log.info("a batch is let go; it goes on later", extra={"batch": folder.id})
            return "let go"
        except (EngineDead, JobBusy):  # another server of this model has it; when that one dies, it is ours
            return "failed"
        except HeadraceError as error:
            log.warning("a batch cannot go on now", extra={"batch": folder.id, "reason": str(error)})
            return "failed"
        finally:
            self._runner = self._queue.running = None
            state.metrics.tell_batch(None)
        return "ended"

    async def _end(self, batch: Waiting) -> None:
        """End a batch that waits; where that fails, it is tried again."""
        try:
            await self._close(batch.folder)
        except HeadraceError as error:
            log.warning("a batch cannot be ended now", extra={"batch": batch.id, "reason": str(error)})

    async def _close(self, folder: JobFolder) -> None:
        try:
            await close_job(folder, self._publish, self._clock)
        except JobBusy:
            return  # whoever runs it has been asked
        self._forget(folder.id)

    def _publish(self, spec: JobSpec, last: JobState) -> None:
        publish_results(self._state.files, spec, last)
