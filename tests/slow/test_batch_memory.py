"""Memory of a job is that of its window: a gigabyte in 200,000 lines takes hardly more than a thousandth of it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = str(Path(__file__).parent / "big_job.py")
#: Columns of 200,000 requests (24 bytes each), their order, and what SQLite and the allocator keep.
ALLOWED = 64 << 20


def peak(home: Path, lines: int, size: int) -> int:
    home.mkdir()
    command = [sys.executable, PROGRAM, str(home), str(lines), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1500)
    (home / "in.jsonl").unlink()
    return int(done.stdout.split()[-1])


def test_two_hundred_thousand_lines_of_a_gigabyte(tmp_path: Path) -> None:
    small = peak(tmp_path / "small", 1_000, 5_000)
    large = peak(tmp_path / "large", 200_000, 5_370)
    print(f"peak resident memory: {small >> 20} MiB with 1,000 lines, {large >> 20} MiB with 200,000")
    assert large - small < ALLOWED
    with (tmp_path / "large" / "out.jsonl").open("rb") as file:
        assert sum(1 for _ in file) == 200_000
