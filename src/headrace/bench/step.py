"""Does the front disturb the engine? Decode-step time of a served engine against one driven in this process."""

import asyncio
import re
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import httpx

from headrace.bench.local_engine import LocalEngine
from headrace.bench.parity_prompts import random_prompts
from headrace.bench.progress import progress
from headrace.bench.serve import calls_from_items, run
from headrace.bench.server_process import free_port, running_server
from headrace.bench.stream_client import Endpoint, stream
from headrace.bench.workload import Item
from headrace.core.config import Config, EngineConfig, ServerConfig
from headrace.core.errors import HeadraceError

_COUNTERS = ("steps_total", "step_seconds_total")
_SAMPLE_S = 0.1


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a decode step, round by round."""

    in_process: list[float]
    served: list[float]
    clients: int

    def summary(self) -> dict[str, Any]:
        """Medians and their ratio."""
        alone, served = median(self.in_process), median(self.served)
        return {
            "clients": self.clients,
            "in_process_step_ms": round(alone * 1000, 2),
            "served_step_ms": round(served * 1000, 2),
            "ratio": round(served / alone, 4),
            "rounds": len(self.served),
        }


def measure(config: EngineConfig, clients: int = 32, outputs: int = 96, rounds: int = 3) -> StepTimes:
    """Stream `clients` sequences of `outputs` tokens in this process and through a server, alternating.

    Only steps count in which all of them decode: from the last first token to the first end.
    """
    engine = LocalEngine(config)
    batch = random_prompts(engine.info.vocab_size, [16] * clients, outputs)
    server = replace(ServerConfig(), port=free_port(), log_level="warning")
    in_process: list[float] = []
    served: list[float] = []
    with running_server(Config(config, server)) as url, progress("in process and served", 2 * rounds) as advance:
        asyncio.run(run(Endpoint(url), calls_from_items(batch[:2]), [0.0, 0.0]))  # first touches
        for number in range(rounds):
            in_process.append(_in_process(engine, batch, f"round-{number}"))
            advance(1)
            served.append(asyncio.run(_served(url, batch)))
            advance(1)
    return StepTimes(in_process, served, clients)


def _in_process(engine: LocalEngine, batch: list[Item], salt: str) -> float:
    """Seconds per step while every sequence decodes."""
    core = engine.engine
    started: set[str] = set()
    for item in batch:
        core.add(item.request(salt))
    while len(started) < len(batch):
        started |= {delta.request for delta in core.step() if delta.tokens}
    before, ended = engine.stats(), False
    while not ended:
        after = engine.stats()
        ended = any(delta.finish is not None for delta in core.step())
    while not core.idle:
        core.step()
    return _per_step(before.steps_total, before.step_seconds_total, after.steps_total, after.step_seconds_total)


async def _served(url: str, batch: list[Item]) -> float:
    """The same, with a streaming client for each sequence; the steps are read from the server's metrics."""
    started, ended = 0, asyncio.Event()
    ready = asyncio.Event()
    async with Endpoint(url).client() as client:

        async def one(body: dict[str, Any], path: str) -> None:
            nonlocal started
            first = True

            def seen(text: str) -> None:
                nonlocal started, first
                if first:
                    first, started = False, started + 1
                    if started == len(batch):
                        ready.set()

            result = await stream(
                client, path, {"model": "default", "return_token_ids": True, **body}, due=0.0, on_text=seen
            )
            ended.set()
            ready.set()
            if result.error is not None:
                raise HeadraceError(f"a client's stream failed: {result.error}")

        tasks = [asyncio.create_task(one(call.body, call.path)) for call in calls_from_items(batch)]
        await ready.wait()
        samples: list[tuple[float, float]] = []
        while not ended.is_set():
            samples.append(await _read(client))
            try:
                await asyncio.wait_for(ended.wait(), _SAMPLE_S)
            except TimeoutError:
                continue
        await asyncio.gather(*tasks)
    if len(samples) < 2:
        raise HeadraceError("the streams were too short to read the server's counters twice; raise --tokens")
    return _per_step(*samples[0], *samples[-1])


def _per_step(steps0: float, seconds0: float, steps1: float, seconds1: float) -> float:
    if steps1 <= steps0:
        raise HeadraceError("no step was counted while all sequences decoded; raise --tokens")
    return (seconds1 - seconds0) / (steps1 - steps0)


async def _read(client: httpx.AsyncClient) -> tuple[float, float]:
    """Steps and step seconds from `/metrics`."""
    text = (await client.get("/metrics")).text
    values = []
    for name in _COUNTERS:
        match = re.search(rf"^headrace:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if match is None:
            raise HeadraceError(f"the server's metrics hold no {name}")
        values.append(float(match[1]))
    return values[0], values[1]
