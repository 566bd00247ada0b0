"""A job's journal: SQLite in WAL mode, one row a line, and the job's state in the same commits.

A commit says together which lines have their result and how long the result files were when they had it. What a process
wrote after its last commit is therefore known to be nobody's when the next one opens the journal.
"""

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.spec import JobSpec, JobState

PENDING, ANSWERED, FAILED = 0, 1, 2
BUSY_SECONDS = 30.0

_SCHEMA = """
CREATE TABLE job (spec TEXT NOT NULL, state TEXT NOT NULL, cancel INTEGER NOT NULL DEFAULT 0);
CREATE TABLE line (
    number INTEGER PRIMARY KEY,
    start INTEGER NOT NULL,
    length INTEGER NOT NULL,
    digest INTEGER NOT NULL,
    key BLOB UNIQUE,
    prompt INTEGER NOT NULL,
    most INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    state INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX line_pending ON line (number) WHERE state = 0;
"""


@dataclass(frozen=True, slots=True)
class LineRow:
    """A line of the input.

    Attributes:
        number: in the file, from 1.
        start: offset of its first byte.
        length: bytes.
        digest: of these bytes, 64 signed bits.
        key: digest of its custom_id; None where it has none.
        prompt: tokens of its prompts.
        most: tokens that it may generate at most.
        kind: equal for lines whose answers are thought to be alike.
        state: `PENDING`, `ANSWERED` or `FAILED`.
    """

    number: int
    start: int
    length: int
    digest: int
    key: bytes | None
    prompt: int = 0
    most: int = 0
    kind: int = 0
    state: int = PENDING


@dataclass(frozen=True, slots=True)
class Columns:
    """The pending requests: one entry each, in the order of the file."""

    numbers: NDArray[np.int64]
    prompt: NDArray[np.int64]
    most: NDArray[np.int32]
    kinds: NDArray[np.int32]


class Journal:
    """Opens the journal of a job. Calls may come from any thread; one at a time gets through.

    Args:
        path: of the database.

    Attributes:
        spec: what was asked for.
        state: how far the job is; written with every commit.
        cancel_wanted: whether anybody had asked for the end of the job at the last commit, or when this was opened.

    Raises:
        JobError: it is not a journal.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_SECONDS, check_same_thread=False,
                isolation_level=None,
            )  # fmt: skip
            self._db.execute("PRAGMA synchronous = NORMAL")
            row = self._db.execute("SELECT spec, state, cancel FROM job").fetchone()
            if row is None:
                raise JobError(f"{path} is no journal of a job")
            self.spec = msgspec.json.decode(row[0], type=JobSpec)
            self.state = msgspec.json.decode(row[1], type=JobState)
            self.cancel_wanted = bool(row[2])
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise JobError(f"the journal {path} cannot be read: {error}") from error

    @staticmethod
    def create(path: Path, spec: JobSpec, state: JobState) -> None:
        """Write a new journal.

        Raises:
            JobError: that cannot be done, e.g. on a full disk.
        """
        try:
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.executescript(_SCHEMA)
                db.execute("INSERT INTO job (spec, state) VALUES (?, ?)", (_json(spec), _json(state)))
        except sqlite3.Error as error:
            raise JobError(f"no journal can be written in {path.parent.parent}: {error}") from error

    def close(self) -> None:
        """Let go of the database."""
        with self._lock:
            self._db.close()

    def ask_to_cancel(self) -> None:
        """Ask whoever runs the job to end it.

        Raises:
            JobError: that cannot be written, e.g. on a full disk.
        """
        try:
            with self._lock:
                self._db.execute("UPDATE job SET cancel = 1")
        except sqlite3.Error as error:
            raise JobError(f"job {self.spec.id} cannot be cancelled: {error}") from error

    def commit(self, results: Iterable[tuple[int, int, int]] = ()) -> None:
        """Write the state, and results as (state, attempts, number of the line), in one transaction."""
        with self._transaction():
            self._db.executemany("UPDATE line SET state = ?, attempts = ? WHERE number = ?", results)
            self._write_state()

    def commit_lines(self, rows: Iterable[LineRow]) -> None:
        """Write validated lines and the state, in one transaction."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO line (number, start, length, digest, key, prompt, most, kind, state) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    (r.number, r.start, r.length, r.digest, r.key, r.prompt, r.most, r.kind, r.state)
                    for r in rows
                ),
            )  # fmt: skip
            self._write_state()

    def lines_with(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Numbers of the lines that have any of a window's keys."""
        places = ",".join("?" * len(keys))
        with self._lock:
            return dict(self._db.execute(f"SELECT key, number FROM line WHERE key IN ({places})", keys))

    def line(self, number: int) -> LineRow:
        """One line.

        Raises:
            JobError: there is none of that number.
        """
        with self._lock:
            row = self._db.execute(
                "SELECT number, start, length, digest, key, prompt, most, kind, state FROM line WHERE number = ?",
                (number,),
            ).fetchone()
        if row is None:
            raise JobError(f"the journal of job {self.spec.id} has no line {number}; it is damaged: run the input anew")
        return LineRow(*row)

    def pending(self, most: int) -> list[LineRow]:
        """The first `most` lines without a result."""
        with self._lock:
            rows = self._db.execute(
                "SELECT number, start, length, digest, key, prompt, most, kind, state FROM line WHERE state = 0 "
                "ORDER BY number LIMIT ?",
                (most,),
            ).fetchall()
        return [LineRow(*row) for row in rows]

    def columns(self) -> Columns:
        """All lines without a result, as arrays: 24 bytes a line."""
        with self._lock:
            count = int(self._db.execute("SELECT count(*) FROM line WHERE state = 0").fetchone()[0])
            wide, narrow = np.empty((2, count), np.int64), np.empty((2, count), np.int32)
            columns = Columns(wide[0], wide[1], narrow[0], narrow[1])
            cursor = self._db.execute("SELECT number, prompt, most, kind FROM line WHERE state = 0 ORDER BY number")
            done = 0
            while rows := cursor.fetchmany(4096):
                part = slice(done, done + len(rows))
                columns.numbers[part], columns.prompt[part], columns.most[part], columns.kinds[part] = zip(*rows)
                done += len(rows)
        return columns

    def prompts(self) -> Iterator[tuple[int, int]]:
        """(tokens in the spool, state) of every line that was a request, in the order of the file."""
        number = 0
        while True:
            with self._lock:
                rows = self._db.execute(
                    "SELECT number, prompt, state FROM line WHERE number > ? AND prompt > 0 ORDER BY number LIMIT 4096",
                    (number,),
                ).fetchall()
            if not rows:
                return
            number = rows[-1][0]
            for _, prompt, state in rows:
                yield prompt, state

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk has rolled back already
                    self._db.execute("ROLLBACK")
                raise

    def _write_state(self) -> None:
        self._db.execute("UPDATE job SET state = ?", (_json(self.state),))
        self.cancel_wanted = bool(self._db.execute("SELECT cancel FROM job").fetchone()[0])


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
