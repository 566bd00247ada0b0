"""The file of prompt tokens, and the one of those that a resumed job has left."""

import asyncio
import os
from pathlib import Path

import pytest
from echo_endpoint import Echo, line, new_job, runner

from headrace.core.errors import EngineDead
from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.spool import job_requests

LINES = [line(f"r{i}", f"line {i}") for i in range(50)]


@pytest.fixture
def begun(tmp_path: Path) -> JobFolder:
    """A job of which some lines are answered."""
    folder = new_job(tmp_path, LINES)
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=20), 2).run())
    return folder


def test_what_is_left_is_whole_however_little_each_write_takes(
    begun: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    journal = begun.journal()
    columns = journal.columns()
    requests = job_requests(begun, journal, columns)
    journal.close()
    assert 0 < len(columns.numbers) < len(LINES)
    texts = [LINES[number - 1]["body"]["text"] for number in columns.numbers]
    assert requests.tokens.tolist() == [ord(letter) for text in texts for letter in text]


@pytest.mark.parametrize("cut", [1, 4, 100])
def test_a_spool_that_lacks_tokens_is_told(begun: JobFolder, cut: int) -> None:
    os.truncate(begun.spool, begun.spool.stat().st_size - cut)
    with pytest.raises(JobError, match=r"tokens\.i32 has fewer tokens"):
        asyncio.run(runner(begun, Echo()).run())


def test_a_spool_of_a_job_that_has_answered_nothing_is_looked_at_too(tmp_path: Path) -> None:
    folder = new_job(tmp_path, LINES)
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=0), 2).run())
    os.truncate(folder.spool, 8)
    with pytest.raises(JobError, match=r"tokens\.i32 has fewer tokens"):
        asyncio.run(runner(folder, Echo()).run())
