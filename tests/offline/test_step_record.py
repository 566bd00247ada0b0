"""The record of a run's steps: deltas of counters, buffered, readable after a crash."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.core.events import EngineStats
from headrace.offline.jobs.step_record import BUFFERED, COLUMNS, StepRecord, read_record


def stats(steps: int) -> EngineStats:
    return EngineStats(
        steps_total=steps, step_seconds_total=0.5 * steps, compute_seconds_total=0.3 * steps,
        memory_seconds_total=0.1 * steps, attention_seconds_total=0.2 * steps, computed_tokens_total=7 * steps,
        output_tokens_total=2 * steps,
    )  # fmt: skip


def test_rows_are_what_counters_grew_by(tmp_path: Path) -> None:
    now = iter([10.0, 11.0, 12.5])
    record = StepRecord(tmp_path / "r", lambda: next(now))
    first, second = record.observer(0, stats(5)), record.observer(1, stats(0))
    first(stats(6))
    first(stats(6))  # nothing has happened: no row
    second(stats(2))
    record.close()
    columns = read_record(tmp_path / "r")
    assert columns["time_s"].tolist() == [1.0, 2.5]
    assert columns["worker"].tolist() == [0, 1]
    assert columns["steps"].tolist() == [1, 2]
    assert columns["step_s"].tolist() == pytest.approx([0.5, 1.0])
    assert columns["rows"].tolist() == [7, 14]


def test_little_waits_in_memory_and_half_a_row_is_no_row(tmp_path: Path) -> None:
    record = StepRecord(tmp_path / "r")
    observe = record.observer(0, stats(0))
    for steps in range(1, BUFFERED + 10):
        observe(stats(steps))
    assert len(read_record(tmp_path / "r")["steps"]) == BUFFERED
    record.close()
    with (tmp_path / "r").open("ab") as file:
        file.write(b"half")
    assert len(read_record(tmp_path / "r")["steps"]) == BUFFERED + 9


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes that would make a file larger are cut short, then refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_that_finds_no_room_ends_with_its_last_whole_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = StepRecord(tmp_path / "r")
    observe = record.observer(0, stats(0))
    with largest_file(100 * 8 * len(COLUMNS) + 13):
        for steps in range(1, BUFFERED + 1):
            observe(stats(steps))
    for steps in range(BUFFERED + 1, 3 * BUFFERED):
        observe(stats(steps))
    record.close()
    assert (tmp_path / "r").stat().st_size == 100 * 8 * len(COLUMNS)
    assert read_record(tmp_path / "r")["steps"].tolist() == [1] * 100
    assert len(caplog.records) == 1


@pytest.mark.parametrize("path", ["/dev/full", "/no/such/folder/r"])
def test_a_record_that_cannot_be_written_troubles_nobody(path: str, caplog: pytest.LogCaptureFixture) -> None:
    record = StepRecord(Path(path))
    observe = record.observer(0, stats(0))
    for steps in range(1, 2 * BUFFERED + 1):
        observe(stats(steps))
    record.close()
    assert len(caplog.records) == 1
    assert path in caplog.text


def test_who_records_no_step_leaves_the_record_of_others(tmp_path: Path) -> None:
    assert not len(read_record(tmp_path / "r")["steps"])
    record = StepRecord(tmp_path / "r")
    record.observer(0, stats(0))(stats(1))
    record.flush()
    other = StepRecord(tmp_path / "r")
    other.observer(0, stats(0))(stats(0))
    other.close()
    record.close()
    assert len(read_record(tmp_path / "r")["steps"]) == 1
