"""Online prompts during a batch, against the same on a server without one; and what they cost the batch.

Phases alternate on one server: online requests alone, the batch alone, both, the batch alone again. The batch's speed
is what the engine computed and was not computed for the online requests, per second.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from headrace.bench.latency_stats import Observed
from headrace.bench.local_engine import model_folder
from headrace.bench.parity_prompts import random_prompts
from headrace.bench.progress import progress
from headrace.bench.server_process import free_port, running_server
from headrace.bench.stream_client import Endpoint, stream
from headrace.bench.workload import COMPLETIONS, mixed
from headrace.core.config import Config, EngineConfig, ServerConfig
from headrace.core.errors import HeadraceError
from headrace.perf.model_config import shape_of_folder
from headrace.perf.presets import as_run
from headrace.perf.profile import load_or_default
from headrace.perf.step_time import StepTimeModel

#: The bound of the issue: so many times the time to first token of an idle server, and the time of one layer.
BOUND = 1.5
_COUNTERS = re.compile(r"^headrace:(computed_tokens_total|abandoned_steps_total|steps_total)\S* (\S+)$", re.M)
#: A batch begins within this time, or never.
PLANNING_S = 300.0
MIXES = 24  # of 64 lines each: more than any run gets done


@dataclass(frozen=True)
class Load:
    """The online requests.

    Attributes:
        requests: of one phase.
        rate: per second.
        prompt_tokens: of each; all prompts differ from the first token on.
        output_tokens: of each.
        vocabulary: token ids of all prompts, the batch's too, are below this.
    """

    requests: int = 40
    rate: float = 1.0
    prompt_tokens: int = 200
    output_tokens: int = 16
    vocabulary: int = 40000


@dataclass
class Seen:
    """What all rounds brought: times to first token, and the batch's tokens per second, by phase."""

    idle: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    alone_rate: list[float] = field(default_factory=list)
    beside_rate: list[float] = field(default_factory=list)
    after_rate: list[float] = field(default_factory=list)
    abandoned: int = 0

    def summary(self, load: Load, layer_s: float) -> dict[str, Any]:
        """One flat result."""
        idle, during = (float(np.percentile(times, 90)) for times in (self.idle, self.during))
        alone, beside, after = (median(r) for r in (self.alone_rate, self.beside_rate, self.after_rate))
        return {
            "online_requests": len(self.during),
            "rate": load.rate,
            "prompt_tokens": load.prompt_tokens,
            "idle_ttft_p50_s": round(float(np.percentile(self.idle, 50)), 3),
            "idle_ttft_p90_s": round(idle, 3),
            "during_ttft_p50_s": round(float(np.percentile(self.during, 50)), 3),
            "during_ttft_p90_s": round(during, 3),
            "ttft_p90_ratio": round(during / idle, 3),
            "layer_s": round(layer_s, 4),
            "bound_s": round(BOUND * idle + layer_s, 3),
            "within_bound": during <= BOUND * idle + layer_s,
            "batch_alone_tokens_per_s": round(alone, 1),
            "batch_beside_tokens_per_s": round(beside, 1),
            "batch_slowdown": round(alone / max(beside, 1e-9), 3),
            "batch_after_tokens_per_s": round(after, 1),
            "steps_given_up": self.abandoned,
        }


def measure(
    config: EngineConfig, load: Load, rounds: int = 2, settle_s: float = 15.0, mixes: int = MIXES
) -> dict[str, Any]:
    """Start a server and measure.

    Args:
        config: of the engine.
        load: the online requests.
        rounds: how often the phases are gone through.
        settle_s: how long the batch is watched alone.
        mixes: size of the batch, in mixed workloads of 64 lines.
    """
    folder = model_folder(config)
    server = replace(ServerConfig(), port=free_port(), log_level="warning")
    seen = Seen()
    prompts = random_prompts(load.vocabulary, [load.prompt_tokens] * (load.requests * 2 * rounds + 4), 1, seed=5)
    tokens = [item.prompt for item in prompts]
    with running_server(Config(config, server)) as url, progress("batch beside online requests", rounds) as advance:
        asyncio.run(_online(url, [tokens.pop() for _ in range(4)], load))  # first touches
        for number in range(rounds):
            seen.idle += asyncio.run(_online(url, [tokens.pop() for _ in range(load.requests)], load))[0]
            with _batch(url, number, load.vocabulary, mixes):
                seen.alone_rate.append(_watch(url, settle_s))
                before = _counters(url)
                started = time.perf_counter()
                times, own = asyncio.run(_online(url, [tokens.pop() for _ in range(load.requests)], load))
                passed, after = time.perf_counter() - started, _counters(url)
                seen.during += times
                computed = after["computed_tokens_total"] - before["computed_tokens_total"]
                seen.beside_rate.append((computed - own) / passed)
                seen.abandoned += int(after["abandoned_steps_total"] - before["abandoned_steps_total"])
                seen.after_rate.append(_watch(url, settle_s))
            advance(1)
    return seen.summary(load, _layer_seconds(config, folder))


async def _online(url: str, prompts: Sequence[list[int]], load: Load) -> tuple[list[float], int]:
    """An open loop of requests; times to first token, and tokens that were computed for them."""

    async def one(client: httpx.AsyncClient, prompt: list[int], due: float) -> Observed:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        body = {
            "model": "default", "prompt": prompt, "max_tokens": load.output_tokens, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        return await stream(client, COMPLETIONS, body, due)

    async with Endpoint(url).client() as client:
        begin = time.perf_counter() + 0.1
        each = [one(client, prompt, begin + i / load.rate) for i, prompt in enumerate(prompts)]
        seen = await asyncio.gather(*each)
    failed = next((result.error or "no output" for result in seen if result.error or not result.arrivals), None)
    if failed is not None:
        raise HeadraceError(f"an online request failed: {failed}")
    return [result.ttft for result in seen], len(seen) * (load.prompt_tokens + load.output_tokens - 1)


@contextmanager
def _batch(url: str, number: int, vocabulary: int, mixes: int) -> Iterator[None]:
    """A batch under way; cancelled and deleted at the end."""
    lines = []
    for part in range(mixes):
        for item in mixed(1000 * number + part):
            prompt = [token % vocabulary for token in item.prompt]
            body = {
                "model": "default", "prompt": prompt, "max_tokens": item.max_tokens, "temperature": 0.0,
                "ignore_eos": True,
            }  # fmt: skip
            custom_id = f"{part}-{item.custom_id}"
            lines.append(json.dumps({"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}))
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
        content = ("\n".join(lines) + "\n").encode()
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
        asked = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()
        _wait_for_work(client, url, batch["id"])
        yield  # after an error the server ends, and its home with it
        state = client.get(f"/v1/batches/{batch['id']}").json()
        if state["status"] != "in_progress":
            raise HeadraceError(f"the batch was {state['status']} before the measurement was over")
        client.post(f"/v1/batches/{batch['id']}/cancel")
        while (state := client.get(f"/v1/batches/{batch['id']}").json())["status"] != "cancelled":
            time.sleep(0.1)
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if state[name]:
                client.delete(f"/v1/files/{state[name]}")


def _wait_for_work(client: httpx.Client, url: str, batch: str) -> None:
    """Return once the batch is validated and planned, and the engine has begun with it."""
    idle = _counters(url)["computed_tokens_total"]
    deadline = time.monotonic() + PLANNING_S
    while _counters(url)["computed_tokens_total"] <= idle:
        status = client.get(f"/v1/batches/{batch}").json()["status"]
        if status not in ("validating", "in_progress") or time.monotonic() > deadline:
            raise HeadraceError(f"the batch does not begin; it is {status}")
        time.sleep(0.1)


def _watch(url: str, seconds: float) -> float:
    """Tokens per second that the engine computes."""
    before, started = _counters(url), time.perf_counter()
    time.sleep(seconds)
    after = _counters(url)
    return (after["computed_tokens_total"] - before["computed_tokens_total"]) / (time.perf_counter() - started)


def _counters(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text
    return {name: float(value) for name, value in _COUNTERS.findall(text)}


def _layer_seconds(config: EngineConfig, folder: Path) -> float:
    """Predicted time of one layer of the largest step, which an online request may have to wait for."""
    dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    device = "cpu" if config.model.device == "auto" else config.model.device
    shape = shape_of_folder(folder, dtype)
    times = StepTimeModel(as_run(load_or_default(device, config.model.threads, dtype), config.model.overlap), shape)
    return times.seconds(times.prefill(0, config.scheduler.max_num_batched_tokens)) / shape.layers
