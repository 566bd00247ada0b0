"""A job over the echo, and the most memory it took: `big_job.py HOME LINES BYTES`, last line the peak in bytes."""

import asyncio
import re
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "offline"))
from echo_endpoint import Echo, runner

from headrace.offline.jobs.folder import create_job
from headrace.offline.jobs.spec import JobSpec, new_job_id


class Forgetful(Echo):
    """Keeps no list of what it has answered."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = _Count()  # type: ignore[assignment]
        self.shares = _Count()  # type: ignore[assignment]


class _Count:
    def __init__(self) -> None:
        self._count = 0

    def append(self, item: object) -> None:
        self._count += 1

    def __len__(self) -> int:
        return self._count


def write(path: Path, lines: int, size: int) -> None:
    """Lines of `size` bytes, most of it in a field that nobody reads."""
    with path.open("wb") as file:
        for number in range(lines):
            head = (
                b'{"custom_id":"r%d","method":"POST","url":"/v1/chat/completions","body":{"text":"abc","pad":"' % number
            )
            file.write(head + b"x" * (size - len(head) - 4) + b'"}}\n')


if __name__ == "__main__":
    home, lines, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    write(home / "in.jsonl", lines, size)
    spec = JobSpec(
        id=new_job_id(), origin="cli", created_at=time.time(), input=str(home / "in.jsonl"),
        output=str(home / "out.jsonl"), errors=str(home / "errors.jsonl"),
    )  # fmt: skip
    state = asyncio.run(runner(create_job(spec, home / "jobs"), Forgetful()).run())
    assert state.completed == lines
    # Not `ru_maxrss`: that begins with what the process had that started this one.
    (peak,) = re.findall(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    print(int(peak) << 10)
