"""The first pass over a job's input: every line is read, understood and entered into the journal, or refused.

Works in windows of lines; after each, one commit says how far it is. A job that dies here goes on behind its last
window. Lines of a job that is to end are only entered: they are not run, so nobody needs to know what they mean.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from headrace.offline.jobs.endpoint import Asked, Endpoint
from headrace.offline.jobs.errors import JobError, WrongLine
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.journal import FAILED, PENDING, Journal, LineRow
from headrace.offline.jobs.lines import MAX_LINE, BatchLine, RawLine, parse_line, read_lines
from headrace.offline.jobs.output import answer_line, error_line, request_id
from headrace.offline.jobs.refusals import refused
from headrace.offline.jobs.results import Result, ResultFiles
from headrace.offline.jobs.spool import SpoolWriter

WINDOW_LINES = 256
WINDOW_BYTES = 4 << 20


class Validation:
    """Validates the input of one job.

    Args:
        folder: of the job.
        journal: its journal.
        files: its results.
        endpoint: what bodies mean.
        limit: bytes a line may have.
        pause: for a second of work, so many seconds are left to others; 0 where nobody else is served.
    """

    def __init__(
        self,
        folder: JobFolder,
        journal: Journal,
        files: ResultFiles,
        endpoint: Endpoint,
        limit: int = MAX_LINE,
        pause: float = 0.0,
    ) -> None:
        self._folder, self._journal, self._files, self._endpoint = folder, journal, files, endpoint
        self._limit = limit
        self._pause = pause
        only = journal.spec.endpoint
        self._urls = endpoint.urls if only is None else (only,)

    async def run(self, tell: Callable[[], None] = lambda: None) -> None:
        """Go through the rest of the input; `tell` is called after every window.

        Raises:
            JobError: the input cannot be read.
            EngineDead: nobody is there to say what bodies mean.
        """
        state = self._journal.state
        try:
            descriptor = os.open(self._journal.spec.input, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise JobError(f"cannot read {self._journal.spec.input}: {error.strerror}") from error
        spool = SpoolWriter(self._folder.spool, state.tokens)
        groups = windows(read_lines(descriptor, state.scanned, state.next_line, self._limit))

        def read() -> list[_Checked]:
            return self._check(next(groups, []))

        try:
            while window := await asyncio.to_thread(read):
                begun = time.perf_counter()
                await self._window(window, spool)
                tell()
                if state.ending is None:
                    await asyncio.sleep((time.perf_counter() - begun) * self._pause)
        finally:
            spool.close()
            os.close(descriptor)

    def _check(self, window: list[RawLine]) -> list["_Checked"]:
        """All that can be said of lines without their bodies."""
        digests = [0 if raw.data is None else signed_digest(raw.data) for raw in window]
        found = [self._parsed(raw) for raw in window]
        keys = [None if line.custom_id is None else key_of(line.custom_id) for line in found]
        first = self._journal.lines_with([key for key in keys if key is not None])
        checked = []
        for raw, digest, line, key in zip(window, digests, found, keys):
            if key is not None and first.setdefault(key, raw.number) != raw.number:
                said = f"line {first[key]} has the same `custom_id`; they must differ"
                line, key = WrongLine("duplicate_custom_id", said, "custom_id", line.custom_id), None
            checked.append(_Checked(raw, digest, key, line))
        return checked

    def _parsed(self, raw: RawLine) -> BatchLine | WrongLine:
        try:
            return parse_line(raw.data, self._urls, self._limit)
        except WrongLine as error:
            return error

    async def _window(self, window: list["_Checked"], spool: SpoolWriter) -> None:
        rows: list[LineRow] = []
        refused: list[Result] = []
        for each in window:
            row, refusal = await self._line(each, spool)
            rows.append(row)
            if refusal is not None:
                refused.append(Result(row.number, refusal, answered=False))
        await asyncio.to_thread(self._commit, window[-1].raw, rows, refused, spool)

    def _commit(self, last: RawLine, rows: list[LineRow], refused: list[Result], spool: SpoolWriter) -> None:
        spool.flush()
        self._files.append(refused)
        state = self._journal.state
        state.scanned, state.next_line, state.tokens = last.end, last.number + 1, spool.tokens
        state.total += len(rows)
        state.failed += len(refused)
        state.requests += len(rows) - len(refused)
        self._journal.commit_lines(rows)

    async def _line(self, checked: "_Checked", spool: SpoolWriter) -> tuple[LineRow, bytes | None]:
        """The row of a line, and where it is refused what is written about it."""
        job, number, line = self._journal.spec.id, checked.raw.number, checked.line
        if isinstance(line, WrongLine):
            return checked.row(FAILED), error_line(job, number, line.custom_id, line.code, str(line), line.param)
        if self._journal.state.ending is not None:
            return checked.row(), None
        try:
            asked = await self._endpoint.prepare(line.url, line.body)
        except Exception as error:
            answer = refused(self._endpoint, error, request_id(job, number))
            return checked.row(FAILED), answer_line(job, number, line.custom_id, answer)
        most = min(asked.most, (1 << 31) - 1)
        return checked.row(PENDING, spool.add(asked.prompts), most, kind_of(asked)), None


@dataclass(frozen=True, slots=True)
class _Checked:
    """A line of which all is known but what its body means.

    Attributes:
        raw: as it was read.
        digest: of its bytes; 0 where there are too many.
        key: of its `custom_id`; None: it has none, or a line before it has the same.
        line: what it asks for, or why it is no request.
    """

    raw: RawLine
    digest: int
    key: bytes | None
    line: BatchLine | WrongLine

    def row(self, state: int = PENDING, prompt: int = 0, most: int = 0, kind: int = 0) -> LineRow:
        """The line's row in the journal."""
        raw = self.raw
        return LineRow(raw.number, raw.offset, raw.length, self.digest, self.key, prompt, most, kind, state)


def windows(lines: Iterator[RawLine]) -> Iterator[list[RawLine]]:
    """Lines in groups bounded by count and bytes."""
    window: list[RawLine] = []
    size = 0
    for line in lines:
        window.append(line)
        size += len(line.data or b"")
        if len(window) >= WINDOW_LINES or size >= WINDOW_BYTES:
            yield window
            window, size = [], 0
    if window:
        yield window


def signed_digest(data: bytes) -> int:
    """Digest of a line, as SQLite holds integers."""
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)


def key_of(custom_id: str) -> bytes:
    """Digest of a `custom_id`: no two that differ have the same."""
    return xxhash.xxh3_128_digest(custom_id.encode())


def kind_of(asked: Asked) -> int:
    """A number for a request's kin; 31 bits of a digest, so that no table of them is needed."""
    return int.from_bytes(xxhash.xxh3_64_digest(asked.kin)[:4], "big") >> 1
