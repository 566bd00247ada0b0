"""A job's result files are its own: it makes them, and writes into no other."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from echo_endpoint import Echo, line, new_job, results, runner

from headrace.core.errors import EngineDead
from headrace.offline.jobs.cancel import cancel_job
from headrace.offline.jobs.endpoint import Answer
from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.folder import create_job, job_of, list_jobs
from headrace.offline.jobs.output import answer_line, error_line, line_head
from headrace.offline.jobs.owned import open_owned
from headrace.offline.jobs.spec import JobSpec, new_job_id

LINES = [line(f"r{i}", "abc") for i in range(20)]


def test_the_second_job_of_one_output_is_refused(tmp_path: Path) -> None:
    first = new_job(tmp_path, LINES)
    with pytest.raises(JobError, match="exists"):
        new_job(tmp_path, LINES)
    assert [each.id for each in list_jobs(tmp_path / "jobs")] == [first.id]
    for name in ("out.jsonl", "errors.jsonl"):
        made = job_of(tmp_path / name, tmp_path / "jobs")
        assert made is not None
        assert made[0].id == first.id
    assert job_of(tmp_path / "in.jsonl", tmp_path / "jobs") is None


def test_a_refused_job_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "errors.jsonl").write_text("precious")
    with pytest.raises(JobError, match=r"errors\.jsonl exists"):
        new_job(tmp_path, LINES)
    assert not (tmp_path / "out.jsonl").exists()
    assert (tmp_path / "errors.jsonl").read_text() == "precious"
    assert not list(Path(tmp_path / "jobs").iterdir())


@pytest.mark.parametrize("ends", [True, False])
def test_a_leftover_job_does_not_touch_what_another_wrote(tmp_path: Path, ends: bool) -> None:
    leftover = new_job(tmp_path, LINES)
    for name in ("out.jsonl", "errors.jsonl"):  # the next file may well get the inode of the one deleted
        (tmp_path / name).unlink()
    asyncio.run(runner(new_job(tmp_path, LINES), Echo()).run())
    whole = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(JobError, match="not of job"):
        asyncio.run(cancel_job(leftover) if ends else runner(leftover, Echo()).run())
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    (tmp_path / "out.jsonl").rename(tmp_path / "kept.jsonl")
    assert asyncio.run(cancel_job(leftover)).status == "cancelled"
    assert len(results(tmp_path)[1]) == 20


def test_an_empty_file_that_is_another_is_refused(tmp_path: Path) -> None:
    leftover = new_job(tmp_path, LINES)
    (tmp_path / "out.jsonl").rename(tmp_path / "old.jsonl")
    (tmp_path / "out.jsonl").touch()
    with pytest.raises(JobError, match="not of job"):
        asyncio.run(runner(leftover, Echo()).run())


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_under_work_is_not_opened_twice(tmp_path: Path, gone: bool) -> None:
    folder = new_job(tmp_path, LINES)
    path = str(tmp_path / "out.jsonl")
    if gone:  # it is made anew, and kept as well
        os.unlink(path)
    first = open_owned(path, folder.id, 0, None)
    try:
        with pytest.raises(JobError, match="another job"):
            open_owned(path, new_job_id(), 0, None)
    finally:
        os.close(first)


def test_files_that_were_moved_are_known_again(tmp_path: Path) -> None:
    folder = new_job(tmp_path, LINES)
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=5), 1).run())
    out = tmp_path / "out.jsonl"
    out.rename(tmp_path / "elsewhere.jsonl")
    out.write_bytes((tmp_path / "elsewhere.jsonl").read_bytes())
    asyncio.run(runner(folder, Echo()).run())
    assert len(results(tmp_path)[0]) == 20


def test_zeros_of_a_lost_write_are_cut_off(tmp_path: Path) -> None:
    folder = new_job(tmp_path, LINES)
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(bytes(4096))
    asyncio.run(runner(folder, Echo()).run())
    assert len(results(tmp_path)[0]) == 20


def test_files_of_a_missing_job_are_made_anew_and_those_of_a_begun_one_are_not(tmp_path: Path) -> None:
    folder = new_job(tmp_path, LINES)
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(EngineDead):
        asyncio.run(runner(folder, Echo(dies_after=5), 1).run())
    assert folder.state().output_inode == (
        (tmp_path / "out.jsonl").stat().st_dev, (tmp_path / "out.jsonl").stat().st_ino
    )  # fmt: skip
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(JobError, match="No such file"):
        asyncio.run(runner(folder, Echo()).run())
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "text", ["", "plain", "a\\\x85b\u2028\u2029\x1c\x0b\r\n", "\u2028" * 9, "é\u0085\U0001f600\u2027"]
)
def test_a_result_is_one_line_by_any_rule(text: str) -> None:
    number = 7
    job = new_job_id()
    answer = Answer(200, "r", json.dumps({"text": text}, ensure_ascii=False).encode())
    for data in (answer_line(job, number, text, answer), error_line(job, number, text, "code", text)):
        assert len(data.decode().splitlines()) == 1
        assert data.startswith(line_head(job))
        assert json.loads(data)["custom_id"] == text
    assert json.loads(answer_line(job, number, text, answer))["response"]["body"] == {"text": text}


def test_a_server_makes_its_files_when_it_writes_them(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    spec = JobSpec(
        id=new_job_id(), origin="server", created_at=time.time(), input=str(tmp_path / "in.jsonl"),
        output=str(out), errors=str(tmp_path / "errors.jsonl"),
    )  # fmt: skip
    create_job(spec, tmp_path / "jobs")
    assert not out.exists()
