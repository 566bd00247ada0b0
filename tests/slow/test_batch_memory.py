"""Memory of a job is that of its window and of what its order keeps of each request, whatever the requests' size."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = str(Path(__file__).parent / "big_job.py")
LINES = 200_000
#: Columns of 200,000 requests (24 bytes each), their order, and what SQLite and the allocator keep.
ALLOWED = 64 << 20
#: What the blended order keeps and works with: some hundred bytes a request, nothing of its tokens.
PLANNED = 1200 * LINES


def peak(home: Path, lines: int, size: int, tokens: int, order: str) -> tuple[int, int]:
    """The most memory resident, and of it the part that no file stands behind."""
    home.mkdir()
    command = [sys.executable, PROGRAM, str(home), str(lines), str(size), str(tokens), order]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1500)
    (home / "in.jsonl").unlink()
    whole, anonymous = done.stdout.split()[-2:]
    return int(whole), int(anonymous)


def test_two_hundred_thousand_lines_of_a_gigabyte(tmp_path: Path) -> None:
    small, _ = peak(tmp_path / "small", 1_000, 5_000, 3, "fcfs")
    large, _ = peak(tmp_path / "large", LINES, 5_370, 3, "fcfs")
    print(f"peak resident memory: {small >> 20} MiB with 1,000 lines, {large >> 20} MiB with 200,000")
    assert large - small < ALLOWED
    with (tmp_path / "large" / "out.jsonl").open("rb") as file:
        assert sum(1 for _ in file) == LINES


def test_the_blended_order_keeps_no_tokens(tmp_path: Path) -> None:
    _, small = peak(tmp_path / "small", 1_000, 1_200, 1_000, "blend")
    whole, large = peak(tmp_path / "large", LINES, 1_200, 1_000, "blend")
    print(f"peak memory, blended: {small >> 20} MiB with 1,000 lines, {large >> 20} MiB with 200,000 of 1,000 tokens")
    print(f"with the pages of the mapped prompts: {whole >> 20} MiB")
    assert large - small < PLANNED
    assert PLANNED < 4 * 1_000 * LINES / 3  # the prompts alone would take more than three times as much
