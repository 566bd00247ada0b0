"""Making a batch of a file: what is known of it before it is read, and its folder."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from headrace.api.batch_endpoint import BatchEndpoint
from headrace.api.batch_queue import BatchQueue, Waiting
from headrace.api.batch_request import BatchRequest
from headrace.api.batch_results import result_ids
from headrace.api.file_info import no_file
from headrace.api.state import ServerState
from headrace.core.errors import HeadraceError
from headrace.offline.jobs.device import JobDevice, device_of
from headrace.offline.jobs.folder import JobFolder, create_job
from headrace.offline.jobs.predict import sample, seconds_of
from headrace.offline.jobs.spec import JobSpec, JobState, new_job_id

ORDER = "blend"


class BatchMaker:
    """See above.

    Args:
        state: the server's.
        endpoint: what bodies mean.
        clock: seconds since the epoch.
    """

    def __init__(self, state: ServerState, endpoint: BatchEndpoint, clock: Callable[[], float]) -> None:
        self._state, self._endpoint, self._clock = state, endpoint, clock
        self._device: JobDevice | None = None

    async def make(self, asked: BatchRequest, queue: BatchQueue) -> Waiting:
        """A new batch, which is not in the queue yet.

        Args:
            asked: what has been checked.
            queue: what may run before it.

        Raises:
            ApiError: 404, its input is gone.
            EngineDead: nobody can say what bodies mean.
        """
        spec = self._spec(asked)
        content = self._state.files.data_path(asked.input_file_id)
        try:
            seconds = await self._predict(content, asked.endpoint)
            batch = Waiting(spec.id, spec.created_at + asked.window, seconds, JobFolder(self._state.jobs / spec.id))
            end = queue.ends(self._clock(), batch).get(spec.id)
            state = JobState(predicted_s=seconds, predicted_end=end)
            await asyncio.to_thread(create_job, spec, self._state.jobs, content, state)
        except FileNotFoundError:
            raise no_file(asked.input_file_id) from None
        return batch

    def device(self) -> JobDevice:
        """The numbers of the engine; blocks at first.

        Raises:
            HeadraceError: they are not known.
        """
        if self._device is None:
            self._device = device_of(self._state.info, self._state.engine)
        return self._device

    def _spec(self, asked: BatchRequest) -> JobSpec:
        job, files = new_job_id(), self._state.files
        output, errors = result_ids(job)
        kept = asked.output_expires_after
        return JobSpec(
            id=job,
            origin="server",
            created_at=self._clock(),
            input=str(JobFolder(self._state.jobs / job).input),
            output=str(files.data_path(output)),
            errors=str(files.data_path(errors)),
            endpoint=asked.endpoint,
            order=ORDER,
            window=asked.window,
            completion_window=asked.completion_window,
            fingerprint=self._endpoint.fingerprint,
            input_file=asked.input_file_id,
            metadata=asked.metadata,
            model=self._state.model,
            kept_s=None if kept is None else kept.seconds,
        )

    async def _predict(self, content: Path, endpoint: str) -> float | None:
        """Seconds that a file will take; None where the device is not known."""
        try:
            device = await asyncio.to_thread(self.device)
        except HeadraceError:
            return None
        limit = self._state.config.max_request_bytes
        return seconds_of(await sample(content, endpoint, self._endpoint, limit), device)
