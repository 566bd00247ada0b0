"""The sample of a file that its time is told from."""

import asyncio
import os
import tracemalloc
from pathlib import Path

import pytest
from echo_endpoint import Echo, line, write_input

from headrace.offline.jobs.endpoint import Asked
from headrace.offline.jobs.lines import BLOCK, CHAT
from headrace.offline.jobs.predict import LONGEST, PLACES, sample


def test_a_sample_tells_of_the_whole_file(tmp_path: Path) -> None:
    write_input(tmp_path / "in", [line(f"r{i:04}", "abcd") for i in range(1000)])
    found = asyncio.run(sample(tmp_path / "in", CHAT, Echo()))
    assert found.lines == pytest.approx(1000)
    assert set(found.prompts) == {4}
    assert found.requests == 1.0


def test_of_a_file_of_blank_lines_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 10
    write_input(tmp_path / "in", [line("first", "abcd")])
    with (tmp_path / "in").open("ab") as file:
        file.write(b"\n" * (64 << 20))
    pread, read = os.pread, 0

    def counted(descriptor: int, size: int, at: int) -> bytes:
        nonlocal read
        data = pread(descriptor, size, at)
        read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    assert asyncio.run(sample(tmp_path / "in", CHAT, Echo(), limit)).prompts == [4]
    assert read <= PLACES * (BLOCK + 2 * limit) + 3


@pytest.mark.parametrize("length", [900_000, 3_000_000])
def test_of_long_lines_few_are_in_memory(tmp_path: Path, length: int) -> None:
    text = line("first", "x" * length)
    write_input(tmp_path / "in", [text] * (60_000_000 // length))

    class Short(Echo):
        async def prepare(self, url: str, body: bytes) -> Asked:
            return Asked([[0] * 4], 4, b"", "")

    tracemalloc.start()
    try:
        found = asyncio.run(sample(tmp_path / "in", CHAT, Short()))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 12 * LONGEST
    assert (found.requests == 1.0) == (length < LONGEST)
