"""The tokens of all prompts in a file that is mapped into memory, so that a job of any size can be planned."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.journal import PENDING, Columns, Journal
from headrace.offline.planning.requests import JobRequests

_ITEM = 4
COPY_TOKENS = 1 << 20


class SpoolWriter:
    """Appends prompts.

    Args:
        path: of the spool.
        tokens: how many it holds by the journal's last commit; what lies behind them is cut off.
    """

    def __init__(self, path: Path, tokens: int) -> None:
        self._file = path.open("ab")
        self._file.truncate(tokens * _ITEM)
        self.tokens = tokens

    def add(self, prompts: Sequence[Sequence[int]]) -> int:
        """Append the prompts of one request as one; returns how many tokens that were."""
        count = 0
        for prompt in prompts:
            self._file.write(np.asarray(prompt, np.int32).tobytes())
            count += len(prompt)
        self.tokens += count
        return count

    def flush(self) -> None:
        """Hand what was added to the system."""
        self._file.flush()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def job_requests(folder: JobFolder, journal: Journal, columns: Columns) -> JobRequests:
    """The pending requests as the planner takes them; their tokens stay on disk.

    In memory are 24 bytes a request and what of the spool is being looked at. A job that is resumed gets a spool of
    what is left.

    Raises:
        JobError: the spool has not the tokens that the journal counts.
    """
    offsets = np.zeros(len(columns.numbers) + 1, np.int64)
    np.cumsum(columns.prompt, out=offsets[1:])
    if not len(columns.numbers):
        return JobRequests(np.empty(0, np.int32), offsets, columns.most, columns.kinds)
    count = int(offsets[-1])
    if count == journal.state.tokens:
        tokens = _mapped(folder.spool, count)
    else:
        _write_rest(folder, journal)
        tokens = _mapped(folder.rest, count)
    _, kinds = np.unique(columns.kinds, return_inverse=True)
    return JobRequests(tokens, offsets, columns.most, kinds.astype(np.int32))


def _mapped(path: Path, tokens: int) -> NDArray[np.int32]:
    if path.stat().st_size < tokens * _ITEM:
        raise _too_short(path)
    return np.memmap(path, np.int32, "r", shape=(tokens,))


def _write_rest(folder: JobFolder, journal: Journal) -> None:
    """Copy the prompts that are still pending, run by run."""
    with folder.spool.open("rb") as spool, folder.rest.open("wb") as rest:
        begin = end = 0
        for prompt, state in journal.prompts():
            if state != PENDING:
                _copy(spool, rest, begin, end)
                begin = end + prompt
            end += prompt
        _copy(spool, rest, begin, end)


def _copy(source: BinaryIO, target: BinaryIO, begin: int, end: int) -> None:
    while begin < end:
        block = os.pread(source.fileno(), min(end - begin, COPY_TOKENS) * _ITEM, begin * _ITEM)
        tokens = len(block) // _ITEM
        if not tokens:
            raise _too_short(Path(source.name))
        view = memoryview(block)[: tokens * _ITEM]
        while view:
            view = view[os.write(target.fileno(), view) :]
        begin += tokens


def _too_short(path: Path) -> JobError:
    return JobError(f"{path} has fewer tokens than the job's journal says; run the input as a new job")
