"""The pending lines of a job, read from the input once more when they are run."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.journal import Columns, Journal
from headrace.offline.jobs.lines import BatchLine, parse_line
from headrace.offline.jobs.validate import signed_digest


class PendingLines:
    """Lines by the numbers that the policy gives them: their places in `columns`.

    A thread of its own reads them, one after another: lines keep their order, and the loop waits neither for the disk
    nor for a commit of the journal.

    Args:
        journal: of the job.
        columns: of the pending lines.
        limit: bytes a line may have.

    Attributes:
        job: its id.

    Raises:
        OSError: the input cannot be opened.
    """

    def __init__(self, journal: Journal, columns: Columns, limit: int) -> None:
        self.job = journal.spec.id
        self._journal, self._numbers, self._limit = journal, columns.numbers, limit
        self._descriptor = os.open(journal.spec.input, os.O_RDONLY | os.O_CLOEXEC)
        self._thread = ThreadPoolExecutor(1, "job-lines")

    async def read(self, index: int, urls: tuple[str, ...]) -> tuple[int, BatchLine]:
        """A line's number in the input, and what it asks for.

        Raises:
            JobError: it is not what it was when it was validated.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, index, urls)

    async def close(self) -> None:
        """Let go of the input, once nothing is read any more."""
        await asyncio.get_running_loop().run_in_executor(self._thread, os.close, self._descriptor)
        self._thread.shutdown(wait=False)

    def _read(self, index: int, urls: tuple[str, ...]) -> tuple[int, BatchLine]:
        row = self._journal.line(int(self._numbers[index]))
        data = os.pread(self._descriptor, row.length, row.start)
        if signed_digest(data) != row.digest:
            path = self._journal.spec.input
            raise JobError(f"line {row.number} of {path} was changed while the job ran; run it anew")
        return row.number, parse_line(data, urls, self._limit)
