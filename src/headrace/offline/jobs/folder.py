"""Where jobs lie: `HEADRACE_HOME/jobs`, one folder each, and who runs which."""

import fcntl
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.core import paths
from headrace.offline.jobs.errors import JobBusy, JobError
from headrace.offline.jobs.journal import Journal
from headrace.offline.jobs.owned import claim_files, discard_files
from headrace.offline.jobs.spec import JOB_ID, JobSpec, JobState

JOURNAL, INPUT = "journal.sqlite", "input.jsonl"
STALE_S = 86400.0
#: How often, and how many times, to try again while others look who runs a job.
LOOK_S, LOOKS = 0.001, 100
_NEW = ".new-"


class JobFolder:
    """One job's folder: `journal.sqlite`, `lock`, and while it runs `tokens.i32` (the spool of prompt tokens).

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def id(self) -> str:
        """Of the job."""
        return self.path.name

    @property
    def input(self) -> Path:
        """An input of its own: a hard link to a file that may be deleted while the job runs."""
        return self.path / INPUT

    @property
    def spool(self) -> Path:
        """File of all prompts' tokens, int32, one prompt after another."""
        return self.path / "tokens.i32"

    @property
    def rest(self) -> Path:
        """The same of those prompts that a resumed job has left."""
        return self.path / "rest.i32"

    @property
    def steps(self) -> Path:
        """What the steps of the last attempt were made of; see `step_record`."""
        return self.path / "steps.f64"

    def journal(self) -> Journal:
        """Open the journal."""
        return Journal(self.path / JOURNAL)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one process that runs the job; the lock goes with the process, however it ends.

        Raises:
            JobBusy: another one does.
        """
        descriptor = self._open_lock()
        try:
            for _ in range(LOOKS):
                if _locked(descriptor, fcntl.LOCK_EX):
                    break
                if not _locked(descriptor, fcntl.LOCK_SH):
                    raise JobBusy(f"job {self.id} is run by another process")
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # only those who look have it, for a moment
                time.sleep(LOOK_S)
            else:
                raise JobBusy(f"job {self.id} is looked at all the time; try again")
            yield
        finally:
            os.close(descriptor)

    @property
    def exists(self) -> bool:
        """Whether there is such a job."""
        return (self.path / JOURNAL).is_file()

    def spec(self) -> JobSpec:
        """What was asked for."""
        journal = self.journal()
        try:
            return journal.spec
        finally:
            journal.close()

    def ask_to_cancel(self) -> None:
        """Have the job end as cancelled at the next look of whoever runs it."""
        journal = self.journal()
        try:
            journal.ask_to_cancel()
        finally:
            journal.close()

    @property
    def cancel_wanted(self) -> bool:
        """Whether anybody has asked for the end of the job.

        Raises:
            JobError: its journal cannot be read.
        """
        journal = self.journal()
        try:
            return journal.cancel_wanted
        except sqlite3.Error as error:
            raise JobError(f"the journal of {self.id} cannot be read: {error}") from error
        finally:
            journal.close()

    def state(self) -> JobState:
        """How far the job is, by the last commit."""
        journal = self.journal()
        try:
            return journal.state
        finally:
            journal.close()

    @property
    def running(self) -> bool:
        """Whether some process runs the job; one that begins to is not disturbed."""
        descriptor = self._open_lock()
        try:
            return not _locked(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def tidy(self, spec: JobSpec) -> None:
        """Delete what a job that has ended needs no more: the spools, and an input that is its own."""
        for path in (self.spool, self.rest):
            path.unlink(missing_ok=True)
        if Path(spec.input).parent == self.path:
            Path(spec.input).unlink(missing_ok=True)

    def discard(self, spec: JobSpec) -> None:
        """Forget a job that has done nothing."""
        discard_files(spec)
        shutil.rmtree(self.path)


def jobs_home() -> Path:
    """The folder of all jobs. Not created here."""
    return paths.home() / "jobs"


def create_job(
    spec: JobSpec, home: Path | None = None, source: Path | None = None, state: JobState | None = None
) -> JobFolder:
    """Make the folder and journal of a new job: both, or nothing that anybody sees.

    Args:
        spec: of the job.
        home: folder of all jobs.
        state: what it begins with; None: nothing is known of it.
        source: a file that becomes the job's own input by a hard link, so that it may be deleted meanwhile.

    Raises:
        FileNotFoundError: `source` is not there (any more).
        JobError: its output or errors exist already, or cannot be made.
    """
    home = home or jobs_home()
    home.mkdir(parents=True, exist_ok=True)
    _sweep(home)
    state = state or JobState()
    state.enter("validating", spec.created_at)
    temporary = Path(tempfile.mkdtemp(prefix=_NEW, dir=home))
    claimed = False
    try:
        if spec.origin == "cli":  # a server's paths are its own
            claim_files(spec, state)
            claimed = True
        if source is not None:
            os.link(source, temporary / Path(spec.input).name)
        Journal.create(temporary / JOURNAL, spec, state)
        os.rename(temporary, home / spec.id)
    except BaseException:
        if claimed:
            discard_files(spec)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return JobFolder(home / spec.id)


def open_job(job_id: str, home: Path | None = None) -> JobFolder:
    """The folder of a job.

    Raises:
        JobError: there is none of that id.
    """
    home = home or jobs_home()
    path = home / job_id
    if not JOB_ID.fullmatch(job_id) or not JobFolder(path).exists:
        raise JobError(f"there is no job {job_id[:100]!r} in {home}; `headrace batch ls` lists them")
    return JobFolder(path)


def find_job(text: str, home: Path | None = None) -> JobFolder:
    """The folder of the job whose id is, or begins with, `text`.

    Raises:
        JobError: there is none, or there are several.
    """
    home = home or jobs_home()
    if JOB_ID.fullmatch(text):
        return open_job(text, home)
    found = [each for each in list_jobs(home) if each.id.startswith(text)] if text.removeprefix("batch_") else []
    if len(found) > 1:
        raise JobError(f"{len(found)} jobs have ids that begin with {text!r}; give more of the id")
    return found[0] if found else open_job(text, home)


def job_of(path: Path, home: Path | None = None) -> tuple[JobSpec, JobState] | None:
    """The newest job that a file is the output or the errors of; None where no job says so."""
    found: list[tuple[JobSpec, JobState]] = []
    for folder in list_jobs(home):
        try:
            spec, state = folder.spec(), folder.state()
        except JobError:  # a damaged journal says nothing of this file
            continue
        if os.path.realpath(path) in (os.path.realpath(spec.output), os.path.realpath(spec.errors)):
            found.append((spec, state))
    return max(found, key=lambda each: each[0].created_at, default=None)


def list_jobs(home: Path | None = None) -> list[JobFolder]:
    """All jobs, in no order."""
    home = home or jobs_home()
    if not home.is_dir():
        return []
    folders = [JobFolder(path) for path in home.iterdir() if JOB_ID.fullmatch(path.name)]
    return [folder for folder in folders if folder.exists]


def held_bytes(home: Path) -> int:
    """Bytes of the inputs that only their jobs have still, since their files were deleted."""
    total = 0
    for path in home.glob(f"*/{INPUT}"):
        with suppress(FileNotFoundError):  # the job has ended meanwhile
            status = path.stat()
            total += status.st_size if status.st_nlink == 1 else 0
    return total


def _sweep(home: Path) -> None:
    """Delete what processes left behind that died while they made a job."""
    for path in home.glob(f"{_NEW}*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def _locked(descriptor: int, kind: int) -> bool:
    """Whether a lock could be had at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
