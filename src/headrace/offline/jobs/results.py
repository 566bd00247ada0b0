"""Result files that hold each result exactly once, whenever the process that writes them dies.

Results are gathered, appended in one go, flushed to the device, and then committed to the journal together with the
files' new lengths. Opening cuts the files back to the lengths of the last commit.
"""

import os
import threading
from dataclasses import dataclass

from headrace.offline.jobs.journal import ANSWERED, FAILED, Journal
from headrace.offline.jobs.owned import inode_of, open_owned

FLUSH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one line.

    Attributes:
        number: of the line.
        data: what is written, with its line end.
        answered: to the output; else to the errors.
        attempts: how often it was run; kept for whoever looks into the journal, nothing here reads it.
        prompt_tokens: of its prompts.
        cached_tokens: of them, those that were not computed.
        output_tokens: generated.
    """

    number: int
    data: bytes
    answered: bool
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class ResultFiles:
    """The output and error files of a job.

    Args:
        journal: of the job.

    Raises:
        JobError: a file is not the job's, is shorter than the journal says, or cannot be written.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: list[Result] = []
        self._bytes = 0
        self._gathering = threading.Lock()  # of these two
        self._flushing = threading.Lock()
        self._closed = False
        self._failure: BaseException | None = None
        spec, state = journal.spec, journal.state
        self._output = open_owned(spec.output, spec.id, state.output_bytes, state.output_inode)
        try:
            self._errors = open_owned(spec.errors, spec.id, state.error_bytes, state.error_inode)
        except BaseException:
            os.close(self._output)
            raise
        try:
            found = inode_of(self._output), inode_of(self._errors)
            if found != (state.output_inode, state.error_inode):  # moved, or made anew
                state.output_inode, state.error_inode = found
                journal.commit()
            os.ftruncate(self._output, state.output_bytes)
            os.ftruncate(self._errors, state.error_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def waiting(self) -> int:
        """Bytes that are not committed yet."""
        return self._bytes

    def add(self, result: Result) -> None:
        """Gather one result."""
        with self._gathering:
            self._waiting.append(result)
            self._bytes += len(result.data)

    def flush(self) -> None:
        """Write and commit what was gathered; may run in a thread beside `add`.

        A flush that failed is the last, and its error everybody's who calls again: the state is ahead of the journal.
        """
        with self._flushing:
            if self._closed:  # a flush that was still to begin when the job was let go
                return
            if self._failure is not None:
                raise self._failure
            try:
                self._flush()
            except BaseException as error:
                self._failure = error
                raise

    def _flush(self) -> None:
        with self._gathering:
            taken, self._waiting, self._bytes = self._waiting, [], 0
        self.append(taken)
        state = self._journal.state
        for result in taken:
            state.completed += result.answered
            state.failed += not result.answered
            state.prompt_tokens += result.prompt_tokens
            state.cached_tokens += result.cached_tokens
            state.output_tokens += result.output_tokens
        self._journal.commit((ANSWERED if r.answered else FAILED, r.attempts, r.number) for r in taken)

    def append(self, results: list[Result]) -> None:
        """Write results to the device and note the new lengths in the state, without committing it."""
        state = self._journal.state
        answers = b"".join(result.data for result in results if result.answered)
        errors = b"".join(result.data for result in results if not result.answered)
        state.output_bytes = _append(self._output, answers, state.output_bytes)
        state.error_bytes = _append(self._errors, errors, state.error_bytes)

    def close(self) -> None:
        """Let go of the files; what was not flushed is as if it had never been."""
        with self._flushing:
            if not self._closed:
                self._closed = True
                os.close(self._output)
                os.close(self._errors)


def _append(descriptor: int, data: bytes, at: int) -> int:
    """Write at an offset and wait for the device; returns the new length."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
    if data:
        os.fdatasync(descriptor)
    return at
