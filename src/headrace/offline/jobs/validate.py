"""The first pass over a job's input: every line is read, understood and entered into the journal, or refused.

Works in windows of lines; after each, one commit says how far it is. A job that dies here goes on behind its last
window.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator

import xxhash

from headrace.core.errors import EngineDead, HeadraceError
from headrace.offline.jobs.endpoint import Asked, Endpoint
from headrace.offline.jobs.errors import JobError, WrongLine
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.journal import FAILED, PENDING, Journal, LineRow
from headrace.offline.jobs.lines import MAX_LINE, RawLine, parse_line, read_lines
from headrace.offline.jobs.output import answer_line, error_line
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
        pause: of a second of work, so many seconds are left to others; 0 where nobody else is served.
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

        def read() -> list[RawLine]:
            return next(groups, [])

        try:
            while window := await asyncio.to_thread(read):
                begun = time.perf_counter()
                await self._window(window, spool)
                tell()
                await asyncio.sleep((time.perf_counter() - begun) * self._pause)
        finally:
            spool.close()
            os.close(descriptor)

    async def _window(self, window: list[RawLine], spool: SpoolWriter) -> None:
        rows: list[LineRow] = []
        refused: list[Result] = []
        keys: dict[bytes, int] = {}
        for line in window:
            row, refusal = await self._line(line, keys, spool)
            rows.append(row)
            if refusal is not None:
                refused.append(Result(line.number, refusal, answered=False))
        await asyncio.to_thread(self._commit, window[-1], rows, refused, spool)

    def _commit(self, last: RawLine, rows: list[LineRow], refused: list[Result], spool: SpoolWriter) -> None:
        spool.flush()
        self._files.append(refused)
        state = self._journal.state
        state.scanned, state.next_line, state.tokens = last.end, last.number + 1, spool.tokens
        state.total += len(rows)
        state.failed += len(refused)
        state.requests += len(rows) - len(refused)
        self._journal.commit_lines(rows)

    async def _line(self, line: RawLine, keys: dict[bytes, int], spool: SpoolWriter) -> tuple[LineRow, bytes | None]:
        """The row of a line, and where it is refused what is written about it."""
        job = self._journal.spec.id
        digest = 0 if line.data is None else signed_digest(line.data)
        key: bytes | None = None
        custom_id: str | None = None
        try:
            try:
                parsed = parse_line(line.data, self._urls, self._limit)
            except WrongLine as error:
                key = None if error.custom_id is None else self._first(error.custom_id, line.number, keys)
                raise
            custom_id = parsed.custom_id
            key = self._first(custom_id, line.number, keys)
            asked = await self._endpoint.prepare(parsed.url, parsed.body)
        except EngineDead:
            raise
        except WrongLine as error:
            row = LineRow(line.number, line.offset, line.length, digest, key, state=FAILED)
            return row, error_line(job, line.number, error.custom_id, error.code, str(error), error.param)
        except HeadraceError as error:
            row = LineRow(line.number, line.offset, line.length, digest, key, state=FAILED)
            return row, answer_line(job, line.number, custom_id or "", self._endpoint.refusal(error))
        tokens = spool.add(asked.prompts)
        most, kind = min(asked.most, (1 << 31) - 1), kind_of(asked)
        return LineRow(line.number, line.offset, line.length, digest, key, tokens, most, kind, PENDING), None

    def _first(self, custom_id: str, number: int, keys: dict[bytes, int]) -> bytes:
        """The key of a `custom_id` that no line before this one has.

        Raises:
            WrongLine: one has.
        """
        key = xxhash.xxh3_128_digest(custom_id.encode())
        first = keys.get(key) or self._journal.first_with(key)
        if first is not None:
            raise WrongLine(
                "duplicate_custom_id",
                f"line {first} has the same `custom_id`; they must differ",
                "custom_id",
                custom_id,
            )
        keys[key] = number
        return key


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


def kind_of(asked: Asked) -> int:
    """A number for a request's kin; 31 bits of a digest, so that no table of them is needed."""
    return int.from_bytes(xxhash.xxh3_64_digest(asked.kin)[:4], "big") >> 1
