"""Which batch runs, and what clients are told of the end of those that wait."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from batch_files import CHAT, begun, chat_line, ended, jsonl, lines_of, model_folder, stalled, start, upload
from openai import OpenAI
from openai.types import Batch
from served import Served, serve_parrot

from headrace.api import batch_making, batch_service
from headrace.api.batch_queue import BatchQueue, Waiting
from headrace.offline.jobs.folder import JobFolder

LINE = jsonl(chat_line("a", "la"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve_parrot(home=tmp_path, path=model_folder(tmp_path / "model")) as server:
        yield server


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.client()


def told(batch: Batch) -> tuple[int, bool]:
    """What is told beyond OpenAI's object."""
    more: dict[str, Any] = batch.model_extra or {}
    return more["predicted_finish_at"], more["meets_window"]


def awaited(client: OpenAI, batch: Batch, condition: Callable[[Batch], bool]) -> Batch:
    """The batch once it is so."""
    until = time.monotonic() + 60
    while not condition(batch):
        assert time.monotonic() < until
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_the_end_is_told(client: OpenAI) -> None:
    batch = start(client, LINE)
    finish, meets = told(batch)
    assert batch.created_at <= finish < batch.created_at + 60
    assert meets
    finish, meets = told(ended(client, batch))
    assert batch.created_at <= finish < batch.created_at + 60
    assert meets


def test_who_waits_waits_for_what_runs(served: Served, client: OpenAI) -> None:
    with stalled(served, client, completion_window="7d"):
        first = start(client, LINE)
        start(client, LINE, completion_window="20d")
        # The engine is silent, so what runs takes longer and longer, and who waits is told.
        awaited(client, first, lambda batch: told(batch)[0] > time.time() + 5)
        ends = [told(batch)[0] for batch in reversed(client.batches.list(limit=3).data)]
        assert ends == sorted(ends)
        assert ends[0] > time.time() + 4


def test_a_window_that_is_too_short_is_told(served: Served, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.api.batch_making.seconds_of", lambda *_: 7200.0)
    with stalled(served, client, completion_window="90s"):
        batch = start(client, LINE, completion_window="1h")
        finish, meets = told(batch)
        assert finish >= batch.created_at + 7200
        assert not meets
        assert told(start(client, LINE, completion_window="5h"))[0] >= finish + 7199


def test_an_urgent_batch_goes_first_and_the_other_goes_on(served: Served, client: OpenAI) -> None:
    song = "la" * 25
    lines = [chat_line(f"r{i}", song) for i in range(448)]  # 64 at once: seven times a second
    served.engine.step = 0.02
    long = begun(client, start(client, jsonl(*lines)), 1)
    urgent = start(client, LINE, completion_window="4s")
    assert told(urgent)[1]
    urgent = ended(client, urgent)
    assert urgent.status == "completed"
    assert client.batches.retrieve(long.id).status == "in_progress"
    served.engine.step = 0.0
    begun_at = time.monotonic()
    long = ended(client, long)
    assert time.monotonic() - begun_at < batch_service.RETRY_S / 2
    assert long.status == "completed"
    ids = [each["custom_id"] for each in lines_of(client, long.output_file_id)]
    assert sorted(ids) == sorted(each["custom_id"] for each in lines)


def test_a_batch_that_has_time_waits(served: Served, client: OpenAI) -> None:
    with stalled(served, client, completion_window="7d") as running:
        before = len(served.engine.seen)
        waiting = start(client, LINE)
        awaited(client, running, lambda batch: told(batch)[0] > told(running)[0] + 1)  # it is still at work
        assert len(served.engine.seen) == before
        assert client.batches.retrieve(waiting.id).status == "validating"
        assert client.batches.retrieve(running.id).status == "in_progress"


def test_inputs_are_looked_at_one_after_another(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    looking, most = 0, 0
    sample = batch_making.sample

    async def counted(*arguments: Any) -> Any:
        nonlocal looking, most
        looking += 1
        most = max(most, looking)
        try:
            return await sample(*arguments)
        finally:
            looking -= 1

    monkeypatch.setattr(batch_making, "sample", counted)
    body = {"input_file_id": upload(served.client(), LINE), "endpoint": CHAT, "completion_window": "24h"}
    with served.http() as http, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: http.post("/v1/batches", json=body).status_code, range(16)))
    assert answers == [200] * 16
    assert most == 1


def test_one_that_cannot_run_drives_nobody_out(tmp_path: Path) -> None:
    queue = BatchQueue()
    queue.running = Waiting("a", 2000.0, 100.0, JobFolder(tmp_path / "a"))
    urgent = Waiting("b", 1000.0, 100.0, JobFolder(tmp_path / "b"))
    for each in (queue.running, urgent):
        queue.add(each)
    assert queue.gives_way(now=850.0)
    assert queue.next(0.0) is urgent
    urgent.not_before = 10.0
    assert not queue.gives_way(now=850.0)
    urgent.not_before, urgent.served = 0.0, False
    assert not queue.gives_way(now=850.0)
    assert queue.next(0.0) is queue.running
    assert set(queue.ends(now=850.0)) == {"a"}
