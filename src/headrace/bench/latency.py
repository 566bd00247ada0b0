"""A long prompt beside a streaming user: what each of them feels under an inter-token target."""

import asyncio
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import httpx
import numpy as np

from headrace.bench.latency_stats import Observed
from headrace.bench.parity_prompts import random_prompts
from headrace.bench.progress import progress
from headrace.bench.server_process import free_port, running_server
from headrace.bench.stream_client import Endpoint, stream
from headrace.bench.workload import COMPLETIONS
from headrace.core.config import Config, EngineConfig, ServerConfig
from headrace.core.errors import HeadraceError

_USER_TOKENS = 1000
_BEFORE = 10


def measure(
    config: EngineConfig, prompt_tokens: int = 3000, rounds: int = 3, vocabulary: int = 40000
) -> dict[str, Any]:
    """Start a server and measure, `rounds` times, the prompt alone and the prompt beside a streaming user.

    Every prompt is new, so none is served from the prefix cache.
    """
    prompts = [item.prompt for item in random_prompts(vocabulary, [prompt_tokens] * (2 * rounds + 1), 1, seed=11)]
    server = replace(ServerConfig(), port=free_port(), log_level="warning")
    idle: list[float] = []
    beside: list[float] = []
    gaps: list[float] = []
    with running_server(Config(config, server)) as url, progress("long prompt beside a user", rounds) as advance:
        asyncio.run(_alone(url, prompts.pop()))  # first touches and, where it learns, the step-time model
        for _ in range(rounds):
            idle.append(asyncio.run(_alone(url, prompts.pop())))
            ttft, during = asyncio.run(_beside(url, prompts.pop()))
            beside.append(ttft)
            gaps += during
            advance(1)
    return {
        "itl_target_ms": round(config.scheduler.itl_target * 1000, 1),
        "prompt_tokens": prompt_tokens,
        "idle_ttft_s": round(median(idle), 3),
        "beside_ttft_s": round(median(beside), 3),
        "ttft_ratio": round(median(beside) / median(idle), 3),
        "user_gaps": len(gaps),
        "user_itl_p50_ms": round(float(np.percentile(gaps, 50)) * 1000, 1),
        "user_itl_p99_ms": round(float(np.percentile(gaps, 99)) * 1000, 1),
        "user_itl_max_ms": round(max(gaps) * 1000, 1),
        "rounds": rounds,
    }


async def _alone(url: str, prompt: list[int]) -> float:
    async with Endpoint(url).client() as client:
        return (await _long(client, prompt)).ttft


async def _beside(url: str, prompt: list[int]) -> tuple[float, list[float]]:
    """The prompt's time to first token, and every gap of the user's that overlaps its prefill."""
    times: list[float] = []
    heard_one = asyncio.Event()

    def heard(text: str) -> None:
        times.append(time.perf_counter())
        heard_one.set()

    async with Endpoint(url).client() as client:
        body = _body(prompt[-30:], _USER_TOKENS)  # a prefix of no other prompt, so nothing is shared
        user = asyncio.create_task(stream(client, COMPLETIONS, body, time.perf_counter(), heard))

        async def next_piece() -> None:
            heard_one.clear()
            waiting = asyncio.create_task(heard_one.wait())
            await asyncio.wait({user, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if user.done():
                raise HeadraceError(f"the user's stream ended too early: {user.result().error or 'raise its length'}")

        while len(times) < _BEFORE:
            await next_piece()
        begun = time.perf_counter()
        long = await _long(client, prompt)
        await next_piece()  # closes the last gap that the prefill may have stretched
        user.cancel()
        await asyncio.wait({user})
    first = long.arrivals[0]
    return long.ttft, [after - before for before, after in pairwise(times) if after > begun and before < first]


async def _long(client: httpx.AsyncClient, prompt: list[int]) -> Observed:
    seen = await stream(client, COMPLETIONS, _body(prompt, 4), time.perf_counter())
    if seen.error is not None or not seen.arrivals:
        raise HeadraceError(f"the long prompt failed: {seen.error or 'no output'}")
    return seen


def _body(prompt: list[int], outputs: int) -> dict[str, Any]:
    return {
        "model": "default",
        "prompt": prompt,
        "max_tokens": outputs,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,  # so that a token whose text is held back is seen when it comes
    }
