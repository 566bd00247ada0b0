"""Runs a job in this process, with an engine of its own, and shows how far it is."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.api.app import make_state
from headrace.api.batch_endpoint import BatchEndpoint
from headrace.api.startup import StartProgress
from headrace.cluster.client import WorkerClient
from headrace.core.config import EngineConfig, ServerConfig, check
from headrace.front.launch import Worker, launch_workers
from headrace.offline.jobs.device import device_of, fleet_of
from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.progress import Progress
from headrace.offline.jobs.runner import JobRunner, Stopped
from headrace.offline.jobs.spec import JobState
from headrace.offline.jobs.step_record import StepRecord
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.target import Target

PLAIN_EVERY_S = 10.0


@dataclass
class Outcome:
    """What became of a job's attempt.

    Attributes:
        state: the job's last state; None: it was interrupted.
        progress: what was told last.
        requests: that the attempt ran, with the tokens that each has produced in `lengths`.
        target: the first engine in numbers.
    """

    state: JobState | None = None
    progress: Progress | None = None
    requests: JobRequests | None = None
    lengths: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    target: Target | None = None


async def run_job(folder: JobFolder, config: EngineConfig, workers: int = 1) -> Outcome:
    """Start so many engines and run the job to its end. What its steps were made of is recorded in the job's folder.

    Raises:
        HeadraceError: the engine cannot start or has ended, or the job cannot go on.
        JobBusy: another process runs it; no engine was started.
        JobError: its input is gone; no engine was started.
    """
    check(config)
    with folder.lock():
        journal = folder.journal()
        order, source = journal.spec.order, journal.spec.input
        journal.close()
        if not os.access(source, os.R_OK):
            raise JobError(f"{source} cannot be read, and job {folder.id} needs it: put it back, or cancel the job")
    interrupt = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt.set)
    starting = StartProgress(config.model.model)
    with starting:
        launching = asyncio.create_task(launch_workers(config, workers, starting))
        if not await _first(launching, interrupt):
            return Outcome()
        started = launching.result()
    starting.ready()
    try:
        endpoint = BatchEndpoint(*(make_state(each.generator, ServerConfig(), each.config) for each in started))
        devices = [device_of(each.generator.client.info, each.config) for each in started]
        with JobProgress(folder.id) as shown:
            runner = JobRunner(
                folder,
                endpoint,
                fleet_of(order, devices),
                windows=[device.window for device in devices],
                optimum=devices[0].optimum,
                tell=shown,
            )
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, runner.stop)
            if interrupt.is_set():
                return Outcome()
            try:
                state = await _recorded(runner, started, folder)
            except Stopped:
                state = None
            return Outcome(state, shown.last, runner.requests, runner.lengths, devices[0].target)
    finally:
        await asyncio.gather(*(each.generator.client.close() for each in started))


async def _recorded(runner: JobRunner, workers: Sequence[Worker], folder: JobFolder) -> JobState:
    """Run the job while the engines' steps are recorded."""
    record = StepRecord(folder.steps)
    try:
        for number, worker in enumerate(workers):
            client = worker.generator.client
            if isinstance(client, WorkerClient):
                client.observe(record.observer(number, await client.stats()))
        return await runner.run()
    finally:
        for worker in workers:
            if isinstance(worker.generator.client, WorkerClient):
                worker.generator.client.observe(None)
        record.close()


async def _first(task: "asyncio.Task[Any]", interrupt: asyncio.Event) -> bool:
    """Wait for a task; False where the interrupt came before, and the task has been cancelled."""
    waiting = asyncio.create_task(interrupt.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


class JobProgress:
    """Called with every `Progress`: a live bar on a terminal, a line now and then elsewhere.

    Args:
        job: its id, told at once, so that the job can be found again.

    Attributes:
        last: what was told last.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self.last: Progress | None = None
        self._bar: Any = None
        self._task: Any = None
        self._said = 0.0

    def __enter__(self) -> "JobProgress":
        """Begin to show."""
        sys.stderr.write(f"headrace: job {self._job}\n")
        sys.stderr.flush()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("validating", total=None, rates="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Show how far the job is."""
        self.last = progress
        done = progress.completed + progress.failed
        if self._bar is not None:
            total = None if progress.status == "validating" else progress.total
            self._bar.update(
                self._task, description=progress.status, completed=done, total=total, rates=rates(progress)
            )
        elif progress.seconds - self._said >= PLAIN_EVERY_S:
            self._said = progress.seconds
            sys.stderr.write(f"headrace: {progress.status}: {done:,} of {progress.total:,}, {rates(progress)}\n")
            sys.stderr.flush()


def rates(progress: Progress) -> str:
    """Rates and the time left, in words."""
    parts = [f"{progress.tokens_per_s:,.0f} tokens/s", f"{progress.running} running"]
    if progress.failed:
        parts.append(f"{progress.failed:,} errors")
    if progress.share_of_optimum is not None:
        parts.append(f"{progress.share_of_optimum:.0%} of the optimum")
    if progress.eta_s is not None:
        minutes, seconds = divmod(round(progress.eta_s), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left")
    return ", ".join(parts)
