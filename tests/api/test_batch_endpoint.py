"""Lines of a batch over the parrot: how many of their sequences may be in the engine's queue."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_files import COMPLETIONS
from parrot import Parrot
from served import parrot_state

from headrace.api.batch_endpoint import BatchEndpoint
from headrace.core.config import EngineConfig
from headrace.core.errors import EngineDead, InvalidRequest
from headrace.core.events import Delta
from headrace.core.request import Request
from headrace.offline.jobs.endpoint import Asked

QUEUE = 16


class Counting(Parrot):
    """Knows how many sequences it had at most, and when it has its half of the queue."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.most = 0
        self.half = asyncio.Event()

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        stream = super().submit(request)
        self.most = max(self.most, len(self.tasks))
        if len(self.tasks) == QUEUE // 2:
            self.half.set()
        return stream


def endpoint_over(monkeypatch: pytest.MonkeyPatch, home: Path) -> tuple[Counting, BatchEndpoint]:
    monkeypatch.setattr("served.Parrot", Counting)
    engine, state = parrot_state(home=home, max_queue=QUEUE)
    assert isinstance(engine, Counting)
    config = EngineConfig()
    state.engine = replace(config, scheduler=replace(config.scheduler, max_queue=QUEUE))
    return engine, BatchEndpoint(state)


async def line(endpoint: BatchEndpoint, song: str = "la", prompts: int = 1, n: int = 1) -> Asked:
    body = {"model": "default", "prompt": [f"[[{song}]]"] * prompts, "n": n, "max_tokens": 50}
    return await endpoint.prepare(COMPLETIONS, json.dumps(body).encode())


def test_half_of_the_queue_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine, endpoint = endpoint_over(monkeypatch, tmp_path)
        asked = [await line(endpoint, n=n, prompts=prompts) for n, prompts in [(4, 1), (1, 3), (2, 2), (1, 1)] * 5]
        answers = await asyncio.gather(*(endpoint.run(each, 0.2) for each in asked))
        assert {answer.status for answer in answers} == {200}
        assert QUEUE // 4 < engine.most <= QUEUE // 2

    asyncio.run(scenario())


def test_a_line_larger_than_that_goes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine, endpoint = endpoint_over(monkeypatch, tmp_path)
        asked = [await line(endpoint, n=n) for n in (3, QUEUE, 3, QUEUE - 1)]
        answers = await asyncio.gather(*(endpoint.run(each, 0.2) for each in asked))
        assert [len(json.loads(answer.body)["choices"]) for answer in answers] == [3, QUEUE, 3, QUEUE - 1]
        assert engine.most == QUEUE

    asyncio.run(scenario())


@pytest.mark.parametrize(("prompts", "n", "param"), [(1, 17, "n"), (17, 1, "prompt"), (9, 2, "n")])
def test_a_line_larger_than_the_queue_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: int, n: int, param: str
) -> None:
    async def scenario() -> None:
        _, endpoint = endpoint_over(monkeypatch, tmp_path)
        with pytest.raises(InvalidRequest, match=f"{prompts * n} sequences.* {QUEUE}.*--max-queue") as refused:
            await line(endpoint, prompts=prompts, n=n)
        assert refused.value.param == param

    asyncio.run(scenario())


def test_who_is_given_up_while_it_waits_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine, endpoint = endpoint_over(monkeypatch, tmp_path)
        engine.step = 3600.0
        tasks = [asyncio.create_task(endpoint.run(await line(endpoint, n=8), 0.2)) for _ in range(3)]
        await engine.half.wait()
        engine.step = 0.0
        tasks[1].cancel()
        tasks[0].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in ended] == [True, True, False]
        assert len(engine.seen) == 16

    asyncio.run(scenario())


def test_who_waits_for_an_engine_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine, endpoint = endpoint_over(monkeypatch, tmp_path)
        engine.step = 3600.0
        tasks = [asyncio.create_task(endpoint.run(await line(endpoint, n=8), 0.2)) for _ in range(3)]
        await engine.half.wait()
        engine.die()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in ended] == [EngineDead] * 3

    asyncio.run(scenario())
