"""A job over the echo, and the most memory it took: `big_job.py HOME LINES BYTES TOKENS ORDER`.

The last line is the peak of all resident memory and of that which no file stands behind, in bytes.
"""

import asyncio
import re
import sys
import threading
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


class Watch(threading.Thread):
    """Looks at the memory that no file stands behind; a mapped file's pages are the system's to take back."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, status("RssAnon"))
            time.sleep(0.01)


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    (value,) = re.findall(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(value) << 10


def write(path: Path, lines: int, size: int, tokens: int) -> None:
    """Lines of `size` bytes, most of it in a field that nobody reads; groups of 16 share half of their prompts."""
    with path.open("wb") as file:
        for number in range(lines):
            group, own = b"%08d" % (number % (lines // 16 + 1)), b"%08d" % number
            text = ((group * tokens)[: tokens // 2] + own * tokens)[:tokens]
            head = b'{"custom_id":"r%d","method":"POST","url":"/v1/chat/completions","body":{"text":"%s","pad":"'
            head %= (number, text)
            file.write(head + b"x" * (size - len(head) - 4) + b'"}}\n')


if __name__ == "__main__":
    home, lines, size, tokens, order = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
    write(home / "in.jsonl", lines, size, tokens)
    spec = JobSpec(
        id=new_job_id(), origin="cli", created_at=time.time(), input=str(home / "in.jsonl"),
        output=str(home / "out.jsonl"), errors=str(home / "errors.jsonl"),
    )  # fmt: skip
    watch = Watch()
    watch.start()
    state = asyncio.run(runner(create_job(spec, home / "jobs"), Forgetful(), order=order).run())
    assert state.completed == lines
    # Not `ru_maxrss`: that begins with what the process had that started this one.
    print(status("VmHWM"), watch.peak)
