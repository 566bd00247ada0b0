"""Ending a job from outside the process that runs it."""

import time
from collections.abc import Callable
from contextlib import suppress

from headrace.core.errors import EngineDead
from headrace.offline.jobs.endpoint import Answer, Asked
from headrace.offline.jobs.errors import JobBusy, JobError
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.lines import URLS
from headrace.offline.jobs.runner import JobRunner, Publish
from headrace.offline.jobs.spec import JobState
from headrace.offline.planning.fleet import Fleet
from headrace.offline.planning.requests import JobRequests


class Unserved:
    """The `Endpoint` of a job that will not run: it understands no body and answers none."""

    urls = URLS

    @property
    def fingerprint(self) -> str:
        """Asked for only of a job that would run."""
        raise JobError("the job is not to be cancelled, and its time is not up: it is left as it was")

    async def prepare(self, url: str, body: bytes) -> Asked:
        """Never called: lines of a job that ends are not understood."""
        raise EngineDead("a job that is being closed has no engine")

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        """Never called: nothing runs."""
        raise EngineDead("a job that is being closed has no engine")

    def pace(self, worker: int, tokens: int | None) -> None:
        """Never called: nothing runs."""

    def refusal(self, error: BaseException) -> Answer:
        """Never called: no body is refused."""
        raise error


async def cancel_job(folder: JobFolder) -> JobState:
    """End a job: whoever runs it is asked and does so within a second; where nobody does, it is ended here.

    A server's job is ended by a server alone, running now or later: its results become files of the server then.

    Returns:
        Its state: `cancelling` or `cancelled`, or the final one that it already had.
    """
    state = folder.state()
    if state.final:
        return state
    folder.ask_to_cancel()
    if folder.spec().origin == "cli":
        with suppress(JobBusy):
            return await close_job(folder)
    state = folder.state()
    if not state.final:
        state.status = "cancelling"
    return state


async def close_job(
    folder: JobFolder, publish: Publish = lambda spec, state: None, clock: Callable[[], float] = time.time
) -> JobState:
    """End a job that is to be cancelled, or whose time is up, without an engine.

    Args:
        folder: of the job.
        publish: as of `JobRunner`.
        clock: as of `JobRunner`.

    Raises:
        JobBusy: another process runs it, and will end it.
        JobError: it is not to be cancelled, and its time is not up.
    """
    return await JobRunner(folder, Unserved(), _unordered, windows=[1], publish=publish, clock=clock).run()


def _unordered(requests: JobRequests) -> Fleet:
    raise JobError("a job that is being closed runs no request")
