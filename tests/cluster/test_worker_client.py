"""The front's end of a worker's socket; the worker's end is this test's."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from headrace.cluster.client import WorkerClient
from headrace.cluster.messages import Failed, Hello, Ready, Start, Stepped, Stop, Submit, decode_to_worker, encode
from headrace.core.config import EngineConfig, SchedulerConfig
from headrace.core.errors import EngineDead, HeadraceError
from headrace.core.events import EngineInfo, EngineStats
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams

NAME = b"worker"
INFO = EngineInfo(
    model="none", fingerprint="0", max_model_len=64, vocab_size=10, eos_token_ids=[0], dtype="float32", device="cpu",
    page_size=16, pages=4, kv_bytes=0, weight_bytes=0, load_seconds=0.0, pid=os.getpid(), path="",
)  # fmt: skip


@asynccontextmanager
async def connected(config: EngineConfig = EngineConfig()) -> AsyncIterator[tuple[WorkerClient, zmq.asyncio.Socket]]:
    """A client and its worker's end of the socket."""
    context = zmq.asyncio.Context.instance()
    front, worker = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    worker.setsockopt(zmq.IDENTITY, NAME)
    address = f"inproc://{uuid.uuid4()}"
    front.bind(address)
    worker.connect(address)
    client = WorkerClient(front, NAME, config)
    try:
        yield client, worker
    finally:
        await client.close()
        worker.close(linger=0)


@asynccontextmanager
async def ready(config: EngineConfig = EngineConfig()) -> AsyncIterator[tuple[WorkerClient, zmq.asyncio.Socket]]:
    """The same, and the worker has said that it is ready."""
    async with connected(config) as (client, worker):
        starting = asyncio.create_task(client.start())
        await worker.send(encode(Hello(os.getpid())))
        assert isinstance(decode_to_worker(await worker.recv()), Start)
        await worker.send(encode(Ready(INFO)))
        await starting
        yield client, worker


def request(name: str) -> Request:
    return Request(id=name, prompt=[1], params=SamplingParams(max_tokens=4))


async def check_lost(client: WorkerClient, worker: zmq.asyncio.Socket, data: bytes, said: str) -> None:
    """What waits for the worker fails when this message comes, and the worker is told to end."""
    reader = client.submit(request("r"))
    assert isinstance(decode_to_worker(await worker.recv()), Submit)
    await worker.send(data)
    with pytest.raises(EngineDead, match=said):
        await anext(reader)
    with pytest.raises(EngineDead, match=said):
        client.submit(request("later"))
    assert isinstance(decode_to_worker(await worker.recv()), Stop)


def test_a_message_that_cannot_be_read_loses_the_worker() -> None:
    async def scenario() -> None:
        async with ready() as (client, worker):
            await check_lost(client, worker, b"nonsense", "messages")

    asyncio.run(scenario())


def test_an_observer_that_fails_loses_the_worker_and_holds_up_nobody() -> None:
    def fail(stats: EngineStats) -> None:
        raise RuntimeError("the observer broke")

    async def scenario() -> None:
        async with ready() as (client, worker):
            client.observe(fail)
            await check_lost(client, worker, encode(Stepped([], EngineStats())), "the observer broke")

    asyncio.run(scenario())


@pytest.mark.parametrize("expected", [False, True])
def test_an_engine_that_fails_once_it_was_ready_is_dead_whatever_the_reason(expected: bool) -> None:
    async def scenario() -> None:
        async with ready() as (client, worker):
            reader = client.submit(request("r"))
            await worker.send(encode(Failed("out of something", expected)))
            with pytest.raises(EngineDead, match="out of something"):
                await anext(reader)

    asyncio.run(scenario())


def test_why_an_engine_cannot_start_is_told_as_it_says_it() -> None:
    async def scenario() -> None:
        async with connected() as (client, worker):
            await worker.send(encode(Failed("no such model", expected=True)))
            with pytest.raises(HeadraceError, match=r"^no such model$") as caught:
                await client.start()
            assert not isinstance(caught.value, EngineDead)

    asyncio.run(scenario())


def test_an_engine_that_is_silent_for_too_long_is_given_up() -> None:
    async def scenario() -> None:
        impatient = EngineConfig(scheduler=SchedulerConfig(step_timeout=0.5))
        async with ready(impatient) as (client, worker):
            await asyncio.sleep(0.8)  # it has nothing to do, and may be silent
            reader = client.submit(request("r"))
            for steps in range(1, 9):  # longer than its time: it says that its steps end
                await asyncio.sleep(0.1)
                await worker.send(encode(Stepped([], EngineStats(steps_total=steps))))
            assert client.dead is None

            async def live_without_a_step() -> None:
                while True:
                    await worker.send(encode(Stepped([], EngineStats(steps_total=8))))
                    await asyncio.sleep(0.05)

            living = asyncio.create_task(live_without_a_step())
            with pytest.raises(EngineDead, match=r"0\.5 s \(--step-timeout\)"):
                await asyncio.wait_for(anext(reader), 20)
            assert client.dead is not None
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)

    asyncio.run(scenario())
