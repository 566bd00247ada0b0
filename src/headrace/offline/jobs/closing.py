"""What is written about lines that were not run; a job can end although its input is gone."""

import os

from headrace.offline.jobs.errors import WrongLine
from headrace.offline.jobs.journal import Journal, LineRow
from headrace.offline.jobs.lines import parse_line
from headrace.offline.jobs.output import error_line
from headrace.offline.jobs.results import Result, ResultFiles
from headrace.offline.jobs.spec import Ending
from headrace.offline.jobs.validate import signed_digest

CLOSING_LINES = 1024
_SAID: dict[Ending, str] = {
    "cancelled": "This request was not run because the batch was cancelled.",
    "expired": "This request could not be executed before the completion window expired.",
    "completed": "This request has no result.",
}


def close_lines(journal: Journal, files: ResultFiles, urls: tuple[str, ...], limit: int) -> None:
    """Say of every line that has no result why, with its `custom_id` as far as the input is still there.

    Args:
        journal: of the job; its state has the `ending`.
        files: its results.
        urls: routes that lines may name.
        limit: bytes a line may have.

    Raises:
        OSError: the results cannot be written.
    """
    ending, job = journal.state.ending or "completed", journal.spec.id
    descriptor = _opened(journal.spec.input)
    try:
        while rows := journal.pending(CLOSING_LINES):
            for row in rows:
                custom_id = None if descriptor is None else _custom_id(descriptor, row, urls, limit)
                said = error_line(job, row.number, custom_id, f"batch_{ending}", _SAID[ending])
                files.add(Result(row.number, said, answered=False))
            files.flush()
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the lines are then told by their numbers alone
        return None


def _custom_id(descriptor: int, row: LineRow, urls: tuple[str, ...], limit: int) -> str | None:
    try:
        data = os.pread(descriptor, row.length, row.start)
        return parse_line(data, urls, limit).custom_id if signed_digest(data) == row.digest else None
    except (OSError, WrongLine):
        return None
