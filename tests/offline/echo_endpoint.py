"""An endpoint without a model: it answers a body with its own text, after as many turns of the loop as it has letters.

Run as a program it runs a job in a process that is killed, by itself, at a point of its choice:
`echo_endpoint.py FOLDER POINT COUNT`, the COUNT-th time it comes there.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from headrace.core.errors import EngineDead, InvalidRequest, QueueFull
from headrace.offline.jobs import generation, validate
from headrace.offline.jobs.endpoint import Answer, Asked
from headrace.offline.jobs.folder import JobFolder, create_job
from headrace.offline.jobs.journal import Journal
from headrace.offline.jobs.lines import CHAT, URLS
from headrace.offline.jobs.runner import JobRunner
from headrace.offline.jobs.spec import JobSpec, new_job_id
from headrace.offline.jobs.spool import SpoolWriter
from headrace.offline.planning.fleet import Fleet
from headrace.offline.planning.target import Target
from headrace.perf.model_shape import ModelShape
from headrace.perf.presets import estimate

PROFILE = estimate("cpu", "test", 2, 2, "float32")
SHAPE = ModelShape(
    layers=2, hidden=64, intermediate=96, linear_params=100_000, head_params=20_000, query_width=64, kv_width=32
)


class Echo:
    """See above. `dies_after` answers the engine is gone, or the worker `mortal` alone; `full` times it has no room;
    `faults` answers are 500s."""

    urls = URLS
    fingerprint = "e" * 64

    def __init__(self, dies_after: int = -1, full: int = 0, faults: int = 0, mortal: int | None = None) -> None:
        self.dies_after, self.full, self.faults, self.mortal = dies_after, full, faults, mortal
        self.by_worker: Counter[int] = Counter()
        self.paces: list[tuple[int, int | None]] = []
        self.answered: list[str] = []
        self.running = self.most = 0
        self.shares: list[float] = []
        self._awaited = 1 << 30
        self._reached = asyncio.Event()

    async def after(self, answers: int) -> None:
        """Return once so many were given."""
        self._awaited = answers
        await self._reached.wait()

    async def prepare(self, url: str, body: bytes) -> Asked:
        text = json.loads(body).get("text")
        if not isinstance(text, str) or not text:
            raise InvalidRequest("`text` is missing", "text")
        return Asked([[ord(letter) for letter in text]], len(text), url.encode(), text)

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        self.shares.append(share)
        if self.full:
            self.full -= 1
            raise QueueFull("no room")
        self._check_alive(worker)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for i in range(len(asked.handle)):
                await asyncio.sleep(0)
                self._check_alive(worker)
                asked.produced = i + 1
        finally:
            self.running -= 1
        if self.faults:
            self.faults -= 1
            return Answer(500, "r", b'{"error":{"message":"it broke"}}')
        self.answered.append(asked.handle)
        self.by_worker[worker] += 1
        if len(self.answered) >= self._awaited:
            self._reached.set()
        size = len(asked.handle)
        return Answer(200, "r", json.dumps({"echo": asked.handle}).encode(), size, 0, size)

    def _check_alive(self, worker: int) -> None:
        if self.mortal is None:
            gone = len(self.answered) == self.dies_after
        else:
            gone = worker == self.mortal and self.by_worker[worker] >= self.dies_after
        if gone:
            raise EngineDead("the echo died away")

    def pace(self, worker: int, tokens: int | None) -> None:
        self.paces.append((worker, tokens))

    def refusal(self, error: BaseException) -> Answer:
        return Answer(400, "r", json.dumps({"error": {"message": str(error)}}).encode())


def line(custom_id: str, text: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"text": text}}


def write_input(path: Path, lines: list[Any]) -> None:
    rows = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
    path.write_bytes(b"\n".join(rows) + b"\n")


def new_job(home: Path, lines: list[Any], **spec: Any) -> JobFolder:
    write_input(home / "in.jsonl", lines)
    return create_job(
        JobSpec(
            id=new_job_id(), origin="cli", created_at=time.time(), input=str(home / "in.jsonl"),
            output=str(home / "out.jsonl"), errors=str(home / "errors.jsonl"), **spec,
        ),
        home / "jobs",
    )  # fmt: skip


def runner(
    folder: JobFolder, endpoint: Any, window: int = 64, workers: int = 1, order: str = "fcfs", **options: Any
) -> JobRunner:
    targets = [Target(PROFILE, SHAPE, kv_tokens=100_000, max_seqs=window)] * workers
    return JobRunner(
        folder, endpoint, lambda requests: Fleet(order, requests, targets), windows=[window] * workers, **options
    )


def results(home: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of the output and of the errors."""

    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(row) for row in path.read_bytes().splitlines()] if path.exists() else []

    return read(home / "out.jsonl"), read(home / "errors.jsonl")


def die_at(point: str, count: int) -> None:
    """Have SIGKILL end this process at a point: `half` a write, `written`, `synced`, `journal` (in the middle of a
    transaction), `committed`, `spooled`."""
    left = count

    def reached() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            reached()
            return result

        return call

    pwrite = os.pwrite

    def half(descriptor: int, data: Any, at: int) -> int:
        written = pwrite(descriptor, data[: -(-len(data) // 2)], at)
        reached()
        return written

    match point:
        case "half":
            os.pwrite = half  # type: ignore[assignment]
        case "written":
            os.pwrite = after(os.pwrite)
        case "synced":
            os.fdatasync = after(os.fdatasync)
        case "journal":
            Journal._write_state = after(Journal._write_state)  # type: ignore[method-assign]
        case "committed":
            Journal.commit = after(Journal.commit)  # type: ignore[method-assign]
        case "spooled":
            SpoolWriter.flush = after(SpoolWriter.flush)  # type: ignore[method-assign]


if __name__ == "__main__":
    # Many small commits, so that there are as many moments to die at.
    validate.WINDOW_LINES, generation.FLUSH_BYTES = 64, 10_000
    die_at(sys.argv[2], int(sys.argv[3]))
    asyncio.run(runner(JobFolder(Path(sys.argv[1])), Echo(), 16).run())
