"""`headrace batch` as a process: wrong files before any work, a job from end to end, and one that is interrupted."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_chat_model
from cli_runs import environment, headrace

from headrace.offline.jobs.folder import create_job, list_jobs, open_job
from headrace.offline.jobs.spec import JobSpec, new_job_id
from headrace.offline.jobs.step_record import read_record
from homes import fresh_home

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENGINE = ("--threads", "1", "--kv-memory", "16MiB", "--no-store")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_chat_model.make(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return fresh_home(tmp_path)


def request(custom_id: str, text: str, url: str = CHAT, **body: Any) -> str:
    prompt: Any = {"messages": [{"role": "user", "content": text}]} if url == CHAT else {"prompt": text}
    whole = {"model": "default", "temperature": 0, "max_tokens": 8, **prompt, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": whole})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "empty"), (b"\x1f\x8b\x08", "gzip"), (b"\x00\x01", "binary"), (b"[{}]", "array")]
)
def test_a_wrong_file_is_one_line_before_any_work(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    out = tmp_path / "out.jsonl"
    done = headrace("batch", "run", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", "/no", home=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()
    assert not list_jobs(tmp_path / "jobs")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(request("a", "b"))
    there = tmp_path / "there.jsonl"
    there.write_text("precious")
    for output, said in [
        (there, "exists"), (source, "exists"), (tmp_path, "folder"), (tmp_path / "no" / "out.jsonl", "no folder"),
    ]:  # fmt: skip
        done = headrace("batch", "run", str(source), "-o", str(output), home=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
    done = headrace("batch", "run", str(source), "-o", str(tmp_path / "o"), "--order", "best", home=tmp_path)
    assert done.returncode == 2
    assert "blend" in done.stderr
    assert there.read_text() == "precious"
    assert headrace("batch", "status", "batch_0", home=tmp_path).returncode == 1


@pytest.mark.parametrize("taken", ["in.png", "link.png", "out.png", "err.png", "none/steps.png"])
def test_a_picture_is_drawn_over_nothing(tmp_path: Path, taken: str) -> None:
    source, out, errors = (tmp_path / name for name in ("in.png", "out.png", "err.png"))
    source.write_text(request("a", "b"))
    (tmp_path / "link.png").symlink_to(source)
    words = ("batch", "run", str(source), "-o", str(out), "--errors", str(errors), "--model", "/no")
    done = headrace(*words, "--plot", str(tmp_path / taken), home=tmp_path)
    assert done.returncode == 2
    assert "--plot" in done.stderr
    assert source.read_text() == request("a", "b")
    assert not list_jobs(tmp_path / "jobs")
    if taken != "err.png":  # of which a plan knows nothing
        done = headrace("plan", str(source), "-o", str(out), "--plot", str(tmp_path / taken), home=tmp_path)
        assert done.returncode == 2
        assert "--plot" in done.stderr


def test_output_and_errors_are_two_files(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(request("a", "b"))
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for errors in ("x/../o.jsonl", "link/../o.jsonl"):
        words = ("-o", str(tmp_path / "o.jsonl"), "--errors", str(tmp_path / errors))
        done = headrace("batch", "run", str(tmp_path / "in.jsonl"), *words, home=tmp_path)
        assert done.returncode == 2
        assert "same file" in done.stderr
    assert not (tmp_path / "o.jsonl").exists()


def test_a_job_that_cannot_begin_leaves_its_paths_free(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(request("a", "b"))
    words = ("batch", "run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "o.jsonl"))
    done = headrace(*words, "--model", "/no/such/model", home=tmp_path)
    assert done.returncode != 0
    assert "/no/such/model" in done.stderr
    assert not (tmp_path / "o.jsonl").exists()
    assert not (tmp_path / "o.errors.jsonl").exists()
    assert not list_jobs(tmp_path / "jobs")


def test_a_file_that_exists_is_refused_with_the_job_that_made_it(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "o.jsonl"
    source.write_text(request("a", "b"))
    spec = JobSpec(
        id=new_job_id(), origin="cli", created_at=0.0, input=str(source), output=str(out), errors=str(tmp_path / "e"),
    )  # fmt: skip
    create_job(spec, tmp_path / "jobs")
    done = headrace("batch", "run", str(source), "-o", str(out), home=tmp_path)
    assert done.returncode == 2
    assert f"it is the output of job {spec.id}, `headrace batch resume {spec.id}` goes on" in done.stderr


def jobs_in(home: Path, *ids: str) -> None:
    for each in ids:
        paths = {name: str(home / f"{each}.{name}") for name in ("input", "output", "errors")}
        Path(paths["input"]).write_text(request("a", "b"))
        create_job(JobSpec(id=each, origin="cli", created_at=86400.0 * 365, **paths), home / "jobs")


def test_a_damaged_journal_is_named_and_the_others_are_listed(tmp_path: Path) -> None:
    good, bad = "batch_" + "a" * 32, "batch_" + "b" * 32
    jobs_in(tmp_path, good, bad)
    (tmp_path / "jobs" / bad / "journal.sqlite").write_bytes(b"no database" * 1000)
    done = headrace("batch", "ls", "--json", home=tmp_path)
    assert done.returncode == 0
    assert [job["id"] for job in json.loads(done.stdout)["jobs"]] == [good]
    assert done.stderr.count("\n") == 1
    assert bad in done.stderr


def test_a_job_is_named_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    first, second = "batch_a" + "0" * 31, "batch_b" + "0" * 31
    jobs_in(tmp_path, first, second)
    done = headrace("batch", "status", "batch_b", home=tmp_path)
    assert second in done.stdout
    assert "1971-01-01" in done.stdout
    for text, said in (("batch_", "no job"), ("batch", "2 jobs"), ("batch_c", "no job")):
        done = headrace("batch", "cancel", text, home=tmp_path)
        assert done.returncode == 1
        assert said in done.stderr
    assert headrace("batch", "cancel", "batch_a", home=tmp_path).stdout == f"{first}: cancelled\n"


def test_a_servers_batch_is_left_to_a_server_to_end(tmp_path: Path) -> None:
    job = new_job_id()
    paths = {name: str(tmp_path / name) for name in ("input", "output", "errors")}
    folder = create_job(JobSpec(id=job, origin="server", created_at=0.0, **paths), tmp_path / "jobs")
    (tmp_path / "input").write_text(request("a", "b"))
    done = headrace("batch", "cancel", job, home=tmp_path)
    assert done.returncode == 0
    assert done.stdout == f"{job}: cancelling; a server ends it, now or when one runs again\n"
    assert not folder.state().final
    assert json.loads(headrace("batch", "status", job, "--json", home=tmp_path).stdout)["status"] == "cancelling"


def test_a_job_that_runs_is_not_resumed_and_no_engine_is_loaded_for_it(tmp_path: Path) -> None:
    job = "batch_" + "a" * 32
    jobs_in(tmp_path, job)
    folder = open_job(job, tmp_path / "jobs")
    folder.steps.write_bytes(b"what the other has recorded")
    with folder.lock():
        done = headrace("batch", "resume", job, home=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [f"headrace: error: job {job} is run by another process"]
    assert folder.steps.read_bytes() == b"what the other has recorded"


def test_a_job_may_go_on_with_another_number_of_engines(tmp_path: Path) -> None:
    job = "batch_" + "a" * 32
    jobs_in(tmp_path, job)
    done = headrace("batch", "resume", job, "--dp", "5000", home=tmp_path)
    assert done.returncode == 2
    assert "--dp 5000" in done.stderr
    assert open_job(job, tmp_path / "jobs").state().status == "validating"


def test_without_its_input_a_job_is_not_resumed_and_no_engine_is_loaded_for_it(tmp_path: Path) -> None:
    job = "batch_" + "a" * 32
    assert headrace("batch", "ls", home=tmp_path).stdout == "no jobs\n"
    jobs_in(tmp_path, job)
    source = Path(open_job(job, tmp_path / "jobs").spec().input)
    source.unlink()
    done = headrace("batch", "resume", job, home=tmp_path)
    assert done.returncode == 1
    assert f"{source} cannot be read" in done.stderr


def test_a_job_from_end_to_end(home: Path, model: str) -> None:
    lines = [request(f"c{i}", f"question {i}") for i in range(30)]
    lines += [request(f"t{i}", f"text {i}", COMPLETIONS, n=2) for i in range(10)]
    lines += ["nonsense", request("c1", "again"), request("long", "x", max_tokens=100_000)]
    source, out = home / "in.jsonl", home / "out.jsonl"
    source.write_text("\n".join(lines))
    done = headrace("batch", "run", str(source), "-o", str(out), "--model", model, *ENGINE, "--json", home=home)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["status"], told["total"], told["completed"], told["failed"]) == ("completed", 43, 40, 3)
    assert f"3 of 43 lines failed; see {home / 'out.errors.jsonl'}" in done.stderr
    answers = {row["custom_id"]: row["response"]["body"] for row in rows(out)}
    assert len(answers) == 40
    assert answers["c3"]["choices"][0]["message"]["role"] == "assistant"
    assert len(answers["t3"]["choices"]) == 2
    assert told["output_tokens"] == sum(body["usage"]["completion_tokens"] for body in answers.values())
    assert len(rows(home / "out.errors.jsonl")) == 3
    listed = json.loads(headrace("batch", "ls", "--json", home=home).stdout)["jobs"]
    assert [job["id"] for job in listed] == [told["id"]]
    shown = headrace("batch", "ls", home=home).stdout
    assert shown.startswith(told["id"])
    status = json.loads(headrace("batch", "status", told["id"], "--json", home=home).stdout)
    assert status["status"] == "completed"
    assert headrace("batch", "resume", told["id"], home=home).returncode == 1
    assert headrace("batch", "cancel", told["id"], home=home).returncode == 1


def test_an_interrupted_job_is_resumed_and_a_cancelled_one_is_not(home: Path, model: str) -> None:
    lines = [request(f"r{i}", f"question {i}", ignore_eos=True, max_tokens=200) for i in range(2000)]
    source, out = home / "in.jsonl", home / "out.jsonl"
    source.write_text("\n".join(lines))
    command = [sys.executable, "-m", "headrace.cli", "batch", "run", str(source), "-o", str(out), "--model", model]
    process = subprocess.Popen([*command, *ENGINE], stdout=subprocess.PIPE, text=True, env=environment(home))
    while not (jobs := list_jobs(home / "jobs")) or not jobs[0].state().completed:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    (job,) = jobs
    kept = job.state().completed
    assert process.returncode == 130
    assert f"headrace batch resume {job.id}" in said
    assert 0 < kept < 2000
    assert json.loads(headrace("batch", "status", job.id, "--json", home=home).stdout)["status"] == "interrupted"
    cancelled = headrace("batch", "cancel", job.id, home=home)
    assert cancelled.stdout.strip() == f"{job.id}: cancelled"
    answers, errors = rows(out), rows(home / "out.errors.jsonl")
    assert len(answers) == kept
    assert sorted(row["custom_id"] for row in answers + errors) == sorted(f"r{i}" for i in range(2000))
    assert headrace("batch", "resume", job.id, home=home).returncode == 1


def test_two_engines_share_a_job_and_their_steps_are_drawn(model: str, home: Path) -> None:
    source, out, picture = home / "in.jsonl", home / "out.jsonl", home / "steps.png"
    texts = [f"{'once upon a time ' * 4}{number}" for number in range(24)]
    source.write_text("\n".join(request(str(i), text, ignore_eos=True) for i, text in enumerate(texts)))
    words = ("-o", str(out), "--model", model, *ENGINE)
    alone = headrace("batch", "run", str(source), *words, home=home)
    assert alone.returncode == 0, alone.stderr
    expected = {row["custom_id"]: row["response"]["body"]["choices"] for row in rows(out)}
    out.unlink()
    done = headrace("batch", "run", str(source), *words, "--dp", "2", "--plot", str(picture), "--json", home=home)
    assert done.returncode == 0, done.stderr
    assert {row["custom_id"]: row["response"]["body"]["choices"] for row in rows(out)} == expected
    assert picture.stat().st_size > 1000
    folder = next(each for each in list_jobs(home / "jobs") if each.spec().workers == 2)
    record = read_record(folder.steps)
    assert set(record["worker"]) == {0.0, 1.0}
    assert record["outputs"].sum() == 24 * 8
    assert (record["step_s"] > record["attention_s"]).all()


@pytest.mark.slow
def test_what_a_hung_engine_had_goes_to_the_other(home: Path, model: str) -> None:
    lines = [request(f"r{i}", f"question {i}", ignore_eos=True, max_tokens=200) for i in range(400)]
    source, out = home / "in.jsonl", home / "out.jsonl"
    source.write_text("\n".join(lines))
    command = [sys.executable, "-m", "headrace.cli", "batch", "run", str(source), "-o", str(out), "--model", model]
    words = [*command, *ENGINE, "--dp", "2", "--step-timeout", "5s"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment(home))
    while not (jobs := list_jobs(home / "jobs")) or not jobs[0].state().completed:
        assert process.poll() is None
        time.sleep(0.01)
    engines = [each for each in psutil.Process(process.pid).children() if "headrace.cluster.worker" in each.cmdline()]
    assert len(engines) == 2
    engines[0].suspend()
    _, said = process.communicate(timeout=110)
    assert process.returncode == 0, said
    assert sorted(row["custom_id"] for row in rows(out)) == sorted(f"r{i}" for i in range(400))
    assert "no step for 5 s" in said


def test_more_engines_than_cores_are_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "in.jsonl").write_text(request("a", "b"))
    words = ("-o", str(tmp_path / "o"), "--model", model, *ENGINE, "--dp", "5000")
    done = headrace("batch", "run", str(tmp_path / "in.jsonl"), *words, home=tmp_path)
    assert done.returncode == 2
    assert "cores" in done.stderr
    assert not (tmp_path / "o").exists()
    assert not list_jobs(tmp_path / "jobs")
