"""A worker and its KV store: what it saved is there for the next one, and the loop stays awake while prefixes load."""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench.tiny_models import save
from headrace.cluster.local import launch
from headrace.cluster.messages import FromWorker, Stepped, Submit, ToWorker
from headrace.cluster.worker import BEAT_SECONDS, IDLE_MS, StopWorker, Worker
from headrace.core.config import CacheConfig, EngineConfig, ModelConfig, StoreConfig
from headrace.core.events import Delta, EngineStats
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.build import build
from headrace.engine.core import Engine
from headrace.store.layout import KVLayout
from headrace.store.opening import OpenedStore
from headrace.store.part import PartId
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.tier import PartWriter

CHUNK = 16


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(save("llama", tmp_path / "model")), threads=1, dtype="float32"),
        cache=CacheConfig(kv_memory=8 << 20),
        store=StoreConfig(tier=(f"dir:{tmp_path / 'store'}:64MiB",), chunk_tokens=CHUNK, replication="all"),
    )


def request(name: str, prompt: list[int], max_tokens: int = 4) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


async def run(config: EngineConfig, requests: list[Request]) -> tuple[dict[str, list[Delta]], EngineStats, str]:
    """Serve requests at once in a worker of their own, which ends as it does behind a server."""
    client = await launch(config)
    try:

        async def collect(item: Request) -> list[Delta]:
            return [delta async for delta in client.submit(item)]

        answers = await asyncio.gather(*(collect(item) for item in requests))
        return {item.id: found for item, found in zip(requests, answers)}, await client.stats(), client.info.store
    finally:
        await client.close()


def words(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def test_stop_writes_what_waits_and_the_next_worker_loads_it(config: EngineConfig) -> None:
    prompt = [3 + i % 90 for i in range(5 * CHUNK + 3)]
    first, _, store = asyncio.run(run(config, [request("a", prompt)]))
    assert "dir:" in store
    second, stats, _ = asyncio.run(run(config, [request("a", prompt)]))
    assert words(second["a"]) == words(first["a"])
    assert second["a"][0].cached_tokens == 5 * CHUNK
    (tier,) = stats.store_tiers
    assert second["a"][0].cached_by_source == {tier: 5 * CHUNK}
    assert stats.hit_tokens_by_source == {tier: 5 * CHUNK}


def test_while_a_slow_tier_loads_others_are_served(config: EngineConfig, tmp_path: Path) -> None:
    prompt = [3 + i % 90 for i in range(20 * CHUNK + 3)]
    first, _, _ = asyncio.run(run(config, [request("a", prompt)]))
    slow = replace(
        config,
        store=replace(config.store, tier=(f"throttled:256KB/s,depth=1:dir:{tmp_path / 'store'}:64MiB",)),
    )  # about a second and a half for 20 chunks of three layers
    order: list[str] = []

    async def scenario() -> None:
        client = await launch(slow)
        try:

            async def collect(item: Request) -> list[Delta]:
                found = [delta async for delta in client.submit(item)]
                order.append(item.id)
                return found

            loading = asyncio.create_task(collect(request("a", prompt)))
            gone = asyncio.create_task(collect(request("gone", [7, *prompt])))
            others = [await collect(request(f"o{i}", [5, 6, 7 + i], 2)) for i in range(5)]
            client.abort("gone")
            assert all(len(words(found)) == 2 for found in others)
            assert words(await loading) == words(first["a"])
            await gone
        finally:
            await client.close()

    asyncio.run(scenario())
    assert order.index("o4") < order.index("a")


def test_what_is_written_after_the_last_step_shows_without_another_request(config: EngineConfig) -> None:
    async def scenario() -> None:
        client = await launch(config)
        try:
            prompt = [3 + i % 90 for i in range(5 * CHUNK + 3)]
            async for _ in client.submit(request("a", prompt)):
                pass
            until = time.monotonic() + 120
            while [tier["parts"] for tier in (await client.stats()).store_tiers.values()] != [5]:
                assert time.monotonic() < until
                await asyncio.sleep(0.02)  # the stats come in meanwhile
        finally:
            await client.close()

    asyncio.run(scenario())


class HeldTier(DirTier):
    """Writes nothing before its gate opens."""

    gate: threading.Event

    def create(self, part: PartId, nbytes: int) -> PartWriter:
        assert self.gate.wait(120)
        return super().create(part, nbytes)


class Script:
    """A link to a front that sends one request; what waits to be written is while the worker idles the first time."""

    def __init__(self, first: Request) -> None:
        self.sent: list[FromWorker] = []
        self.waits: list[int | None] = []
        self.gate = threading.Event()
        self.stores: list[KVStore] = []
        self._messages: list[ToWorker] = [Submit(first)]

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def receive(self, wait_ms: int | None) -> ToWorker | None:
        if self._messages:
            return self._messages.pop()
        if wait_ms != 0:
            self.waits.append(wait_ms)
            if len(self.waits) == 1:
                self.gate.set()
                assert self.stores[0].flush(60)
            elif len(self.waits) == 5:
                raise StopWorker
        return None


class Prompting:
    """An engine that computes a long prompt for some steps, which bring nothing to tell."""

    idle = False

    def __init__(self, clock: list[float]) -> None:
        self._clock, self._steps = clock, 0

    def step(self, interrupt: object) -> list[Delta]:
        self._steps += 1
        self._clock[0] += 0.4 * BEAT_SECONDS
        if self._steps > 10:
            raise StopWorker
        return []

    def stats(self) -> EngineStats:
        return EngineStats(steps_total=self._steps)


def test_a_worker_at_a_long_prompt_says_that_its_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    script = Script(request("a", [1]))
    script.receive(0)  # the engine has it
    with pytest.raises(StopWorker):
        Worker(script, Prompting(clock)).run()  # type: ignore[arg-type]
    told = [message.stats.steps_total for message in script.sent if isinstance(message, Stepped)]
    assert told == [1, 4, 7, 10]


def test_an_idle_worker_sends_its_numbers_only_when_they_change_and_does_not_spin(
    config: EngineConfig, tmp_path: Path
) -> None:
    script = Script(request("a", [3 + i % 90 for i in range(5 * CHUNK + 3)]))

    def opened(settings: StoreConfig, layout: KVLayout) -> OpenedStore:
        tier = HeldTier(tmp_path / "held", 64 << 20)
        tier.gate = script.gate
        script.stores.append(KVStore(layout, [tier], StoreSettings.of(settings)))
        return OpenedStore(script.stores[0], "held")

    engine = Engine(config, build(config, open_the_store=opened))
    with pytest.raises(StopWorker):
        Worker(script, engine).run()  # type: ignore[arg-type]
    assert script.waits == [IDLE_MS] * 5
    stepped = [message for message in script.sent if isinstance(message, Stepped)]
    last = [message for message in stepped if message.deltas][-1]
    assert last.deltas[-1].finish == "length"
    assert [tier["parts"] for tier in last.stats.store_tiers.values()] == [0]
    after = stepped[stepped.index(last) + 1 :]
    assert [[tier["parts"] for tier in message.stats.store_tiers.values()] for message in after] == [[5]]
    assert engine.close(60)
