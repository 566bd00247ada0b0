"""What a job is, and how far it is: plain data, kept in its journal."""

import re
import uuid
from typing import Any, Literal

import msgspec

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]  # fmt: skip
Ending = Literal["completed", "expired", "cancelled"]
Origin = Literal["cli", "server"]
#: Device and inode of a file.
Inode = tuple[int, int]

FINAL: frozenset[Status] = frozenset({"completed", "failed", "expired", "cancelled"})
JOB_ID = re.compile(r"batch_[0-9a-f]{32}")


def new_job_id() -> str:
    """A fresh id; nothing in it comes from a user."""
    return f"batch_{uuid.uuid4().hex}"


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; never changes.

    Attributes:
        id: of the job, see `JOB_ID`.
        origin: `cli` jobs belong to a command, `server` jobs to the server of their model.
        created_at: seconds since the epoch.
        input: path of the requests.
        output: path of the answers.
        errors: path of what could not be answered.
        endpoint: the route that every line must name; None: chat and completions alike.
        order: of the requests, see `offline.planning`.
        window: seconds from creation after which the job expires; None: never.
        completion_window: the same as the user wrote it.
        config: of the engine, as builtins; what `resume` starts it with.
        workers: engines that share the job.
        fingerprint: of the model of a server's job; empty: not known yet.
        input_file: the server's id of the input.
        metadata: the user's own.
        model: name of the model of a server's job.
        kept_s: how long a server keeps the results, from when they are files; None: until they are deleted.
    """

    id: str
    origin: Origin
    created_at: float
    input: str
    output: str
    errors: str
    endpoint: str | None = None
    order: str = "blend"
    window: float | None = None
    completion_window: str | None = None
    config: dict[str, Any] = {}
    workers: int = 1
    fingerprint: str = ""
    input_file: str | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    kept_s: int | None = None

    @property
    def expires_at(self) -> float | None:
        """Seconds since the epoch."""
        return None if self.window is None else self.created_at + self.window


class JobState(msgspec.Struct, kw_only=True):
    """How far a job is: what the last commit of its journal says.

    Attributes:
        status: as OpenAI names it.
        ending: what it will have been; noted for good once it is cancelled, its time is up, or all lines are done.
        scanned: bytes of the input that have been validated.
        next_line: number of the line that begins there.
        tokens: prompt tokens in the spool.
        output_bytes: valid bytes of the output; what lies behind them belongs to no commit.
        error_bytes: valid bytes of the errors.
        output_inode: of the output file that the job made; None: not noted, its path is known to be nobody else's.
        error_inode: the same of the errors.
        total: lines that are not blank.
        completed: those with an answer.
        failed: those with an error.
        requests: lines that could be requests.
        prompt_tokens: of answered lines.
        cached_tokens: of them, those that were not computed.
        output_tokens: of answered lines.
        seconds: time that requests of the job ran, all attempts together; validating and planning are left out.
        reason: why it failed.
        predicted_s: how long it was expected to run when it was created.
        predicted_end: when it is expected to end, seconds since the epoch.
        fingerprint: of the model that answers.
        times: when each status was entered, seconds since the epoch.
    """

    status: Status = "validating"
    ending: Ending | None = None
    scanned: int = 0
    next_line: int = 1
    tokens: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    output_inode: Inode | None = None
    error_inode: Inode | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    reason: str = ""
    predicted_s: float | None = None
    predicted_end: float | None = None
    fingerprint: str = ""
    times: dict[str, float] = {}

    @property
    def final(self) -> bool:
        """Nothing will change any more."""
        return self.status in FINAL

    @property
    def validated(self) -> bool:
        """Whether every line of the input is in the journal, also of a job that was cancelled meanwhile."""
        return "in_progress" in self.times or self.status in ("in_progress", "finalizing")

    def enter(self, status: Status, now: float) -> None:
        """Change the status."""
        self.status = status
        self.times[status] = now
