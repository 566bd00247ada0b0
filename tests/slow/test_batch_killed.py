"""`kill -9` of a job, and of a server with a batch, at 20 random moments: each request gets exactly one result."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from headrace.bench.server_process import free_port
from headrace.core import paths
from headrace.offline.jobs.folder import JobFolder, list_jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = 20
LINES = 3600
WRONG = (100, 1555, 2399)  # lines that are no requests
ENGINE = ("--threads", "1", "--kv-memory", "8MiB", "--max-num-seqs", "16", "--no-store")


def write_input(path: Path) -> list[str]:
    """Requests of all lengths, most with shared beginnings; returns their ids."""
    dice = random.Random(7)
    begins = ["The quick brown fox " * 8, "A lazy dog " * 15, ""]
    rows, ids = [], []
    for i in range(LINES):
        if i in WRONG:
            rows.append("{this is no request")
            continue
        text = dice.choice(begins) + f"number {i}"
        body: dict[str, Any] = {"model": "default", "max_tokens": dice.randint(1, 60), "temperature": 0}
        body["messages"] = [{"role": "user", "content": text}]
        ids.append(f"r{i}")
        rows.append(json.dumps({"custom_id": ids[-1], "method": "POST", "url": "/v1/chat/completions", "body": body}))
    path.write_text("\n".join(rows) + "\n")
    return ids


def environment(home: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    return {**clean, "HEADRACE_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def share_kernels(home: Path) -> None:
    """What the machine has compiled already need not be compiled again."""
    (paths.home() / "kernels").mkdir(parents=True, exist_ok=True)
    (home / "kernels").symlink_to(paths.home() / "kernels")


def start(home: Path, *words: str) -> "subprocess.Popen[bytes]":
    with (home / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", *words],
            stdout=log, stderr=log, env=environment(home), start_new_session=True,
        )  # fmt: skip


def kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def wait_for_more(process: "subprocess.Popen[bytes]", folder: JobFolder, dice: random.Random) -> bool:
    """Until some more is done, and a moment longer; False once the job has ended."""
    state = folder.state()
    target = state.scanned + state.output_bytes + dice.choice([1, 2_000, 6_000])
    while not state.final:
        assert process.poll() in (None, 0), "it ended by itself"
        if state.scanned + state.output_bytes >= target:
            time.sleep(dice.uniform(0, 0.25))  # which moment it is, is to be random
            return not folder.state().final
        time.sleep(0.01)
        state = folder.state()
    return False


def check(answers: list[dict[str, Any]], errors: list[dict[str, Any]], ids: list[str]) -> None:
    assert sorted(each["custom_id"] for each in answers) == sorted(ids)
    assert [each["error"]["line"] for each in errors] == [line + 1 for line in WRONG]
    assert all(each["response"]["body"]["choices"][0]["finish_reason"] in ("stop", "length") for each in answers)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_bytes().splitlines()]


def test_a_job_killed_at_twenty_moments(tmp_path: Path, model: Path) -> None:
    share_kernels(tmp_path)
    dice = random.Random(1)
    ids = write_input(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    words = ["batch", "run", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", str(model), *ENGINE]
    process = start(tmp_path, *words)
    while not (jobs := list_jobs(tmp_path / "jobs")):
        assert process.poll() is None
        time.sleep(0.01)
    (folder,) = jobs
    kills = 0
    while kills < KILLS and wait_for_more(process, folder, dice):
        kill(process)
        kills += 1
        process = start(tmp_path, "batch", "resume", folder.id)
    assert process.wait(300) == 0
    assert kills == KILLS
    check(read(out), read(tmp_path / "out.errors.jsonl"), ids)


def test_a_server_killed_at_twenty_moments(tmp_path: Path, model: Path) -> None:
    share_kernels(tmp_path)
    dice = random.Random(2)
    ids = write_input(tmp_path / "in.jsonl")
    port = free_port()
    words = ["serve", str(model), "--port", str(port), "--log-level", "error", *ENGINE]
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0, timeout=60)
    process = start(tmp_path, *words)
    try:
        listening(process, client)
        file = client.files.create(file=(tmp_path / "in.jsonl").open("rb"), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        folder = JobFolder(tmp_path / "jobs" / batch.id)
        kills = 0
        while kills < KILLS and wait_for_more(process, folder, dice):
            kill(process)
            kills += 1
            process = start(tmp_path, *words)
        assert kills == KILLS
        listening(process, client)
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing")
            time.sleep(0.2)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        answers, errors = (
            [json.loads(row) for row in client.files.content(name).text.splitlines()]
            for name in (batch.output_file_id, batch.error_file_id)
        )
        check(answers, errors, ids)
    finally:
        kill(process)


def listening(process: "subprocess.Popen[bytes]", client: OpenAI) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None
        with contextlib.suppress(Exception):
            client.models.list()
            return
        time.sleep(0.1)
    raise AssertionError("the server does not listen")
