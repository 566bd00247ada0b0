"""An engine in its own process, over a real socket."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from headrace.bench.tiny_models import save
from headrace.cluster.local import LocalEngine, launch
from headrace.core.config import MIN_STEP_TIMEOUT, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, StoreConfig
from headrace.core.errors import EngineDead, HeadraceError, QueueFull
from headrace.core.events import Delta
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = save("llama", tmp_path_factory.mktemp("tiny"))
    return EngineConfig(
        model=ModelConfig(model=str(model), threads=1, dtype="float32"),
        cache=CacheConfig(kv_memory=8 << 20),
        scheduler=SchedulerConfig(max_queue=40),
        store=StoreConfig(store=False),
    )


def request(name: str, max_tokens: int = 6, prompt: list[int] | None = None, service: str = "online") -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(id=name, prompt=prompt or [5, 6, 7], params=params, service=service)  # type: ignore[arg-type]


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[LocalEngine]:
    client = await launch(config)
    try:
        yield client
    finally:
        await client.close()


async def collect(client: LocalEngine, item: Request) -> list[int]:
    found: list[int] = []
    async for delta in client.submit(item):
        assert delta.error is None
        found += delta.tokens
    return found


async def collect_rest(reader: AsyncIterator[Delta]) -> None:
    async for _ in reader:
        pass


def test_requests_stream_abort_and_fail_one_by_one(config: EngineConfig) -> None:
    async def scenario() -> None:
        phases: list[str] = []
        client = await launch(config, lambda phase, done: phases.append(phase))
        try:
            assert client.info.pid == client.pid != os.getpid()
            assert "pack" in phases
            answers = await asyncio.gather(*(collect(client, request(f"r{i}")) for i in range(20)))
            assert len(answers[0]) == 6
            assert all(answer == answers[0] for answer in answers)

            reader = client.submit(request("long", 4000))
            async for delta in reader:
                assert delta.tokens
                break
            await reader.aclose()
            reader = client.submit(request("stopped", 4000))
            async for delta in reader:
                client.abort("stopped")
                if delta.finish is not None:
                    assert delta.finish == "abort"

            readers = [client.submit(request(f"q{i}")) for i in range(40)]
            with pytest.raises(QueueFull, match="40 requests"):
                client.submit(request("one too many"))
            for reader in readers:
                await collect_rest(reader)

            refused = [delta async for delta in client.submit(request("bad", prompt=[9999]))]
            assert [delta.finish for delta in refused] == ["error"]
            assert "0..306" in str(refused[0].error)
            await collect(client, request("after"))
            stats = await client.stats()
            assert stats.requests_total == {"length": 61, "abort": 2}
            assert stats.pages_used == stats.running == stats.waiting == 0
        finally:
            await client.close()
        assert not psutil.pid_exists(client.pid)

    asyncio.run(scenario())


def test_online_work_interrupts_an_offline_step_in_the_worker(config: EngineConfig, tmp_path: Path) -> None:
    # Steps of some tenths of a second over twelve layers, so that a request surely arrives in the middle of one.
    model = save("llama", tmp_path, num_hidden_layers=12, hidden_size=512, intermediate_size=2048)
    slow = replace(
        config,
        model=replace(config.model, model=str(model)),
        cache=CacheConfig(kv_memory=256 << 20),
        scheduler=replace(config.scheduler, max_num_batched_tokens=1000),
    )

    async def scenario() -> None:
        async with running(slow) as client:
            work = [request(f"off{i}", 2, [3 + i] * 3900, "offline") for i in range(3)]
            offline = [asyncio.create_task(collect(client, item)) for item in work]
            asked = 0
            while not (await client.stats()).abandoned_total:
                assert not all(task.done() for task in offline), "no online request came in the middle of a step"
                await collect(client, request(f"on{asked}", 1))
                asked += 1
            assert [len(tokens) for tokens in await asyncio.gather(*offline)] == [2, 2, 2]

    asyncio.run(scenario())


def test_a_request_that_the_engine_cannot_begin_fails_alone(config: EngineConfig) -> None:
    async def scenario() -> None:
        async with running(config) as client:
            # No front lets such a token through; it stands for whatever nobody thought of.
            params = SamplingParams(max_tokens=4, stop_token_ids=(-(1 << 40),))
            poison = Request(id="poison", prompt=[5, 6, 7], params=params)
            refused = [delta async for delta in client.submit(poison)]
            assert [delta.finish for delta in refused] == ["error"]
            assert "log" in str(refused[0].error)
            assert len(await collect(client, request("after"))) == 6

    asyncio.run(scenario())


def test_when_the_engine_is_killed_readers_are_told(config: EngineConfig) -> None:
    async def scenario() -> None:
        client = await launch(config)
        try:
            reader = client.submit(request("r", 4000))
            await anext(reader)
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match="signal 9"):
                await collect_rest(reader)
            with pytest.raises(EngineDead):
                client.submit(request("later"))
        finally:
            await client.close()

    asyncio.run(scenario())


def test_an_engine_whose_step_does_not_end_is_ended(config: EngineConfig) -> None:
    async def scenario() -> None:
        impatient = replace(config, scheduler=replace(config.scheduler, step_timeout=MIN_STEP_TIMEOUT))
        client = await launch(impatient)
        try:
            reader = client.submit(request("r", 4000))
            await anext(reader)
            process = psutil.Process(client.pid)
            process.suspend()
            with pytest.raises(EngineDead, match="no step"):
                await asyncio.wait_for(collect_rest(reader), 60)
            await asyncio.to_thread(psutil.wait_procs, [process], 20)
            assert not process.is_running()
        finally:
            await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_whole_group_do_not_end_the_engine(config: EngineConfig, name: signal.Signals) -> None:
    async def scenario() -> None:
        async with running(config) as client:
            os.kill(client.pid, name)
            assert len(await collect(client, request("r", 6))) == 6

    asyncio.run(scenario())


def test_an_engine_that_cannot_start_says_why_in_one_line(config: EngineConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        wrong = EngineConfig(model=ModelConfig(model=str(tmp_path)))
        with pytest.raises(HeadraceError, match="holds no safetensors") as caught:
            await launch(wrong)
        assert "\n" not in str(caught.value)

    asyncio.run(scenario())


def test_the_worker_dies_with_its_front(config: EngineConfig) -> None:
    script = (
        "import asyncio, sys\n"
        "import msgspec\n"
        "from headrace.cluster.local import launch\n"
        "from headrace.core.config import EngineConfig\n"
        "async def main():\n"
        "    client = await launch(msgspec.json.decode(sys.argv[1], type=EngineConfig))\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    import msgspec

    front = subprocess.Popen(
        [sys.executable, "-c", script, msgspec.json.encode(config).decode()], stdout=subprocess.PIPE, text=True
    )
    assert front.stdout is not None
    worker = psutil.Process(int(front.stdout.readline()))
    front.kill()
    front.wait()
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
