"""Runs the pending lines of a job on its workers: whom its policy names, while each worker has room."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from headrace.core.errors import EngineDead, QueueFull
from headrace.offline.jobs.backoff import Backoff
from headrace.offline.jobs.endpoint import Answer, Asked, Endpoint
from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.lines import BatchLine
from headrace.offline.jobs.output import answer_line, request_id
from headrace.offline.jobs.pending_lines import PendingLines
from headrace.offline.jobs.refusals import refused
from headrace.offline.jobs.results import FLUSH_BYTES, Result, ResultFiles
from headrace.offline.planning.fleet import Fleet

TICK_SECONDS = 0.1
MAX_ATTEMPTS = 3

log = logging.getLogger(__name__)


class Generation:
    """One attempt's requests.

    Args:
        lines: what to run.
        endpoint: that answers.
        fleet: names the next ones.
        windows: requests in flight at most, on each worker.
        files: take the results.
        share: of a step with online requests that the job may take now.
        finished: told a request's index and the tokens it has produced, 0 where it was refused.
    """

    def __init__(
        self,
        lines: PendingLines,
        endpoint: Endpoint,
        fleet: Fleet,
        windows: Sequence[int],
        files: ResultFiles,
        share: Callable[[], float],
        finished: Callable[[int, int], None],
    ) -> None:
        self._lines, self._endpoint, self._fleet, self._windows = lines, endpoint, fleet, windows
        self._files, self._share, self._finished = files, share, finished
        self._tasks: dict[int, asyncio.Task[Result]] = {}
        self._workers: dict[int, int] = {}  # who runs each
        self._dropped: set[asyncio.Task[Result]] = set()  # of lost workers; cancelled, not seen yet
        self._asked: dict[int, Asked] = {}
        self._in_flight = [0] * len(windows)
        self._backoffs = [Backoff() for _ in windows]
        self._paces: list[int | None] = [None] * len(windows)
        self._ready: list[deque[int]] = [deque() for _ in windows]
        self._done: asyncio.Queue[tuple[int, int, asyncio.Task[Result]]] = asyncio.Queue()

    @property
    def running(self) -> int:
        """Requests being generated."""
        return len(self._tasks)

    async def run(self, until: "asyncio.Task[None]") -> None:
        """Keep all workers supplied until nothing is left, or `until` is done; what it raised is raised.

        Raises:
            EngineDead: no worker is left.
            JobError: the input was changed, or the policy names nothing.
        """
        fleet = self._fleet
        waiting: asyncio.Task[tuple[int, int, asyncio.Task[Result]]] | None = None
        try:
            while not until.done():
                self._supply()
                if not self._tasks:
                    if fleet.remaining:
                        raise JobError("the order admits nothing although requests are left")
                    return
                waiting = waiting or asyncio.create_task(self._done.get())
                tick = TICK_SECONDS if fleet.follows_progress else None
                await asyncio.wait({waiting, until}, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    self.tell_progress()
                    continue
                ended, waiting = [waiting.result()], None
                while not self._done.empty():
                    ended.append(self._done.get_nowait())
                for each in ended:
                    self._take(*each)
                if self._files.waiting > FLUSH_BYTES:
                    await asyncio.to_thread(self._files.flush)
            until.result()
        finally:
            if waiting is not None:
                waiting.cancel()

    async def cancel(self) -> None:
        """Abort what runs, and let the engines go at their own pace again."""
        for worker in range(len(self._windows)):
            self._set_pace(worker, None)
        for index in list(self._tasks):
            self._drop(index)
        await asyncio.gather(*self._dropped, return_exceptions=True)

    def tell_progress(self) -> None:
        """Tell the policy how many tokens there are of each request."""
        asked = self._asked
        self._fleet.progress(
            np.fromiter(asked, np.int64, len(asked)),
            np.fromiter((each.produced for each in asked.values()), np.int64, len(asked)),
        )

    def _supply(self) -> None:
        for worker, ready in enumerate(self._ready):
            ready.extend(self._fleet.admit(worker, time.monotonic()))
            self._set_pace(worker, self._fleet.step_tokens(worker))
            while ready and self._in_flight[worker] < self._windows[worker]:
                self._begin(ready.popleft(), worker)

    def _set_pace(self, worker: int, tokens: int | None) -> None:
        if tokens != self._paces[worker]:
            self._paces[worker] = tokens
            self._endpoint.pace(worker, tokens)

    def _begin(self, index: int, worker: int) -> None:
        task = asyncio.create_task(self._line(index, worker))
        task.add_done_callback(lambda task: self._done.put_nowait((index, worker, task)))
        self._tasks[index] = task
        self._workers[index] = worker
        self._in_flight[worker] += 1

    def _take(self, index: int, worker: int, task: "asyncio.Task[Result]") -> None:
        """A task is done: take its result, or give what its worker had to the others."""
        self._in_flight[worker] -= 1
        if task in self._dropped:
            self._dropped.discard(task)
            if not task.cancelled():
                task.exception()  # seen
            return
        try:
            result = task.result()
        except EngineDead:
            if not self._fleet.lose(worker):
                raise
            log.warning("a worker has ended; the others take what it had", extra={"worker": worker})
            self._ready[worker].clear()
            self._forget(index)
            for other in [other for other, who in self._workers.items() if who == worker]:
                self._drop(other)
            return
        self._forget(index)
        self._files.add(result)
        self._fleet.finish(index, result.output_tokens, time.monotonic())
        self._finished(index, result.output_tokens)

    def _drop(self, index: int) -> None:
        """Abort a request; another worker, or a later attempt, may run it."""
        task = self._tasks[index]
        self._forget(index)
        task.cancel()
        self._dropped.add(task)

    def _forget(self, index: int) -> None:
        del self._tasks[index], self._workers[index]
        self._asked.pop(index, None)

    async def _line(self, index: int, worker: int) -> Result:
        """Generate one line's answer on a worker."""
        number, line = await self._lines.read(index, self._endpoint.urls)
        attempt = 0
        while True:
            attempt += 1
            answer = await self._answer(number, line, index, worker)
            if answer.status < 500 or attempt >= MAX_ATTEMPTS:
                break
        return Result(
            number,
            answer_line(self._lines.job, number, line.custom_id, answer),
            answer.status == 200,
            attempt,
            answer.prompt_tokens,
            answer.cached_tokens,
            answer.output_tokens,
        )

    async def _answer(self, number: int, line: BatchLine, index: int, worker: int) -> Answer:
        backoff = self._backoffs[worker]
        try:
            asked = self._asked[index] = await self._endpoint.prepare(line.url, line.body)
            while True:
                await backoff.wait()
                try:
                    return await self._endpoint.run(asked, self._share(), worker)
                except QueueFull:  # online requests fill the engine's queue; ours can wait
                    backoff.refused()
        except Exception as error:
            return refused(self._endpoint, error, request_id(self._lines.job, number))
