"""Runs the batches of a server, one after another, the one that is due first before the others."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.api.batch_endpoint import BatchEndpoint
from headrace.api.batch_object import ERRORS, OUTPUT
from headrace.api.errors import ApiError, disk_full
from headrace.api.file_store import FileInfo, derived_id, no_file
from headrace.api.state import ServerState
from headrace.core.errors import EngineDead, HeadraceError, QueueFull
from headrace.offline.jobs.cancel import close_job
from headrace.offline.jobs.device import JobDevice, device_of, fleet_of
from headrace.offline.jobs.errors import JobBusy, JobError
from headrace.offline.jobs.folder import JobFolder, create_job, list_jobs
from headrace.offline.jobs.predict import sample, seconds_of
from headrace.offline.jobs.runner import JobRunner, Stopped
from headrace.offline.jobs.spec import JobSpec, JobState, new_job_id

log = logging.getLogger("headrace.api")

MAX_WAITING = 1000  # batches that have not ended
RETRY_S = 10.0
LONGEST_TIMER_S = 86400.0 * 40
PAUSE = 1.0  # validation leaves as much time to the front's other work as it takes
ORDER = "blend"


@dataclass(slots=True)
class Waiting:
    """A batch that has not ended.

    Attributes:
        folder: of the job.
        due: when it expires, seconds since the epoch.
        not_before: on the loop's clock, when to try it again.
        expiry: ends it when its time is up while others run.
    """

    folder: JobFolder
    due: float
    not_before: float
    expiry: asyncio.TimerHandle


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
        self._waiting: dict[str, Waiting] = {}
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._runner: JobRunner | None = None
        self._stopping = False
        self._device: JobDevice | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._unreadable: set[str] = set()  # batches of which the log has told

    async def resume(self) -> None:
        """Take up the batches that this model's servers left unfinished."""
        for folder in await asyncio.to_thread(self._unfinished):
            self._queue(folder)

    async def create(
        self, source: FileInfo, endpoint: str, window: float, completion_window: str, metadata: dict[str, str] | None
    ) -> JobFolder:
        """Make a batch and queue it.

        Raises:
            QueueFull: too many have not ended.
            ApiError: the server ends.
        """
        if self._stopping:
            raise ApiError(503, "the server is shutting down", "service_unavailable", code="shutting_down")
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} batches have not ended yet; try again later")
        job = new_job_id()
        files = self._state.files
        spec = JobSpec(
            id=job,
            origin="server",
            created_at=self._clock(),
            input=str(self._state.jobs / job / "input.jsonl"),
            output=str(files.data_path(derived_id(job, OUTPUT))),
            errors=str(files.data_path(derived_id(job, ERRORS))),
            endpoint=endpoint,
            order=ORDER,
            window=window,
            completion_window=completion_window,
            fingerprint=self._endpoint.fingerprint,
            input_file=source.id,
            metadata=metadata,
        )
        content = files.data_path(source.id)
        try:
            seconds = await self._predict(content, endpoint)
            state = JobState(predicted_s=seconds)
            if seconds is not None:
                state.predicted_end = (
                    spec.created_at + await asyncio.to_thread(self._backlog, spec.expires_at) + seconds
                )
            folder = await asyncio.to_thread(create_job, spec, self._state.jobs, content, state)
        except FileNotFoundError:
            raise no_file(source.id) from None
        self._queue(folder)
        return folder

    def get(self, batch_id: str) -> JobFolder:
        """A batch of any server of this `HEADRACE_HOME`, but no job of a command; `batch_id` is well formed.

        Raises:
            ApiError: 404, there is none.
        """
        folder = JobFolder(self._state.jobs / batch_id)
        found = folder.exists
        with suppress(JobError):  # one that cannot be read may be a server's; whoever reads it next tells
            found = found and folder.spec().origin == "server"
        if not found:
            raise ApiError(404, f"No batch found: {batch_id}", param="batch_id", code="batch_not_found")
        return folder

    def batches(self) -> list[JobFolder]:
        """All batches, the newest first, but those whose journal is damaged (the log tells of each once)."""
        found: list[tuple[float, JobFolder]] = []
        for folder in list_jobs(self._state.jobs):
            try:
                spec = folder.spec()
            except JobError as error:
                if disk_full(error):
                    raise  # none can be read
                if folder.id not in self._unreadable:
                    self._unreadable.add(folder.id)
                    log.warning("a batch cannot be read", extra={"batch": folder.id, "reason": str(error)})
                continue
            if spec.origin == "server":
                found.append((spec.created_at, folder))
        return [folder for _, folder in sorted(found, key=lambda each: (-each[0], each[1].id))]

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
        if self._runner is not None and self._runner.job == folder.id:
            self._runner.look()
            return
        await self._close(folder)

    def stop(self) -> None:
        """Let go of the running batch; it goes on when the next server starts."""
        self._stopping = True
        self._arrived.set()
        if self._runner is not None:
            self._runner.stop()

    async def close(self) -> None:
        """Stop, and wait until the files are closed."""
        self.stop()
        if self._worker is not None:
            await self._worker
        for waiting in self._waiting.values():
            waiting.expiry.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _unfinished(self) -> list[JobFolder]:
        found = []
        for folder in list_jobs(self._state.jobs):
            try:
                spec, state = folder.spec(), folder.state()
            except HeadraceError as error:
                log.warning("a batch cannot be read", extra={"batch": folder.id, "reason": str(error)})
                continue
            if spec.origin != "server":
                continue
            if state.final:
                folder.tidy(spec)  # a server that died at the very end has not done it
            elif spec.fingerprint == self._endpoint.fingerprint or (spec.expires_at or math.inf) <= self._clock():
                found.append(folder)  # one of another model is only ended when its time is up
        return found

    def _queue(self, folder: JobFolder) -> None:
        loop = asyncio.get_running_loop()
        due = folder.spec().expires_at or math.inf
        expiry = loop.call_later(max(0.0, min(due - self._clock(), LONGEST_TIMER_S)), self._expire, folder)
        self._waiting[folder.id] = Waiting(folder, due, 0.0, expiry)
        self._state.metrics.batches = len(self._waiting)
        self._arrived.set()
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        """Run what waits, until `stop`."""
        now = asyncio.get_running_loop().time
        while not self._stopping:
            self._arrived.clear()
            ready = [each for each in self._waiting.values() if each.not_before <= now()]
            if not ready:
                next_try = min((each.not_before for each in self._waiting.values()), default=None)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_try):
                        await self._arrived.wait()
                continue
            first = min(ready, key=lambda each: (each.due, each.folder.id))
            try:
                ended = await self._run(first.folder)
            except Exception as error:
                log.exception("a batch failed", exc_info=error, extra={"batch": first.folder.id})
                ended = False
            if ended:
                self._forget(first.folder)
            first.not_before = now() + RETRY_S

    def _forget(self, folder: JobFolder) -> None:
        waiting = self._waiting.pop(folder.id, None)
        self._state.metrics.batches = len(self._waiting)
        if waiting is not None:
            waiting.expiry.cancel()

    def _expire(self, folder: JobFolder) -> None:
        """The time of a batch is up; where it runs, its runner ends it."""
        if self._runner is not None and self._runner.job == folder.id:
            self._runner.look()
        elif not self._stopping:
            task = asyncio.create_task(self._close(folder))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _run(self, folder: JobFolder) -> bool:
        """One attempt; False where it must be tried again."""
        state, device = self._state, await asyncio.to_thread(self._device_of)
        runner = self._runner = JobRunner(
            folder,
            self._endpoint,
            fleet_of(ORDER, [device]),
            windows=[device.window],
            optimum=device.optimum,
            limit=state.config.max_request_bytes,
            pause=PAUSE,
            tell=state.metrics.tell_batch,
            publish=self._publish,
            clock=self._clock,
        )
        try:
            begun = await asyncio.to_thread(folder.state)
            state.metrics.begin_batch(begun.completed, begun.failed)
            if self._stopping:
                return False
            await runner.run()
        except (Stopped, EngineDead):
            return False
        except JobBusy:  # another server of this model has it; when that one dies, it is ours
            return False
        except HeadraceError as error:
            log.warning("a batch cannot go on now", extra={"batch": folder.id, "reason": str(error)})
            return False
        finally:
            self._runner = None
            state.metrics.tell_batch(None)
        return True

    async def _close(self, folder: JobFolder) -> None:
        """End a batch that waits."""
        try:
            await close_job(folder, self._publish, self._clock)
        except JobBusy:
            return  # whoever runs it has been asked
        self._forget(folder)

    async def _predict(self, content: Path, endpoint: str) -> float | None:
        """Seconds that a file will take; None where the device is not known."""
        try:
            device = await asyncio.to_thread(self._device_of)
        except HeadraceError:
            return None
        return seconds_of(await sample(content, endpoint, self._endpoint, self._state.config.max_request_bytes), device)

    def _backlog(self, due: float | None) -> float:
        """Seconds of the batches that are due before."""
        waiting = list(self._waiting.values())
        seconds = 0.0
        for each in waiting:
            if due is None or each.due <= due:
                with suppress(JobError):  # a damaged one takes no time
                    state = each.folder.state()
                    seconds += max(0.0, (state.predicted_s or 0.0) - state.seconds)
        return seconds

    def _device_of(self) -> JobDevice:
        if self._device is None:
            self._device = device_of(self._state.info, self._state.engine)
        return self._device

    def _publish(self, spec: JobSpec, last: JobState) -> None:
        """Make files of the results; done again after a crash, it changes nothing."""
        for what, path, size in ((OUTPUT, spec.output, last.output_bytes), (ERRORS, spec.errors, last.error_bytes)):
            if size and os.path.exists(path):
                name = f"{spec.id}_{what}.jsonl"
                self._state.files.publish(Path(path), name, "batch_output", derived_id(spec.id, what))
