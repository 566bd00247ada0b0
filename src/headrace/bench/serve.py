"""An open-loop client: requests are sent when they are due, however the server fares."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.arrivals import gamma_arrivals
from headrace.bench.latency_stats import Observed
from headrace.bench.stream_client import Endpoint, stream
from headrace.bench.traces import read_trace, synthesise
from headrace.bench.workload import CHAT, COMPLETIONS, Item, mixed
from headrace.core.errors import ConfigError
from headrace.core.sampling import SamplingParams


@dataclass(frozen=True)
class Call:
    """A request to send: path, body without the model, and seconds after the start when it is due (None: by rate)."""

    path: str
    body: dict[str, Any]
    due: float | None = None


def calls_from_items(batch: list[Item]) -> list[Call]:
    """Completion requests with token id prompts."""
    defaults = msgspec.to_builtins(SamplingParams())
    calls = []
    for item in batch:
        params = {k: v for k, v in msgspec.to_builtins(item.params).items() if v != defaults[k]}
        calls.append(Call(COMPLETIONS, {"prompt": item.prompt, **params}))
    return calls


def calls_from_file(path: Path) -> list[Call]:
    """The requests of an OpenAI batch file, sent as they stand.

    Raises:
        ConfigError: the file cannot be read or a line is wrong.
    """
    calls = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                request = json.loads(line)
                url, body = request.get("url", COMPLETIONS), request["body"]
                if url not in (COMPLETIONS, CHAT) or not isinstance(body, dict):
                    raise ConfigError(f"{path} line {number}: url {url!r} with a body object is what is needed")
                calls.append(Call(url, {k: v for k, v in body.items() if k != "model"}))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} line {number}: not a batch request ({error})") from error
    if not calls:
        raise ConfigError(f"{path} holds no request")
    return calls


def calls_from_trace(path: Path, *, limit: int, vocabulary: int, max_prompt: int, time_scale: float) -> list[Call]:
    """The requests of a trace with synthesised prompts; times are multiplied by `time_scale`."""
    if not time_scale > 0:
        raise ConfigError(f"--time-scale must be above 0, got {time_scale}")
    entries = read_trace(path, limit)
    prompts = synthesise(entries, vocabulary, max_prompt=max_prompt)
    return [
        Call(
            COMPLETIONS,
            {"prompt": prompt, "max_tokens": entry.output_tokens, "temperature": 0.0, "ignore_eos": True},
            None if entry.time is None else entry.time * time_scale,
        )
        for entry, prompt in zip(entries, prompts)
    ]


def schedule(calls: list[Call], rate: float | None, cv: float, seed: int) -> list[float]:
    """When each call is due, in seconds: by the trace, or by Gamma arrivals where a rate is given.

    Raises:
        ConfigError: there is neither a rate nor a time.
    """
    if rate is not None:
        return gamma_arrivals(len(calls), rate, cv, seed)
    if any(call.due is None for call in calls):
        raise ConfigError(
            "give --rate (requests per second; inf: all at once): these requests have no times of their own"
        )
    return [call.due or 0.0 for call in calls]


def limited(calls: list[Call], limit: int, max_tokens: int) -> list[Call]:
    """The first `limit` calls (0: all), none with more than `max_tokens` output tokens (0: as they are)."""
    chosen = calls[: limit or None]
    if not max_tokens:
        return chosen
    cut = []
    for call in chosen:
        name = "max_completion_tokens" if "max_completion_tokens" in call.body else "max_tokens"
        count = min(int(call.body.get(name) or max_tokens), max_tokens)
        cut.append(Call(call.path, {**call.body, name: count}, call.due))
    return cut


def default_calls() -> list[Call]:
    """The mixed workload."""
    return calls_from_items(mixed())


async def run(
    endpoint: Endpoint, calls: list[Call], due: list[float], advance: Callable[[int], None] | None = None
) -> list[Observed]:
    """Send every call when it is due and wait for all; the order of the results is that of the calls."""
    async with endpoint.client() as client:
        # Warm the connection pool's code paths and fail early when nobody listens.
        await _reachable(client, endpoint)
        start = time.perf_counter() + 0.05

        async def one(call: Call, offset: float) -> Observed:
            await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
            seen = await stream(client, call.path, {"model": endpoint.model, **call.body}, start + offset)
            if advance is not None:
                advance(1)
            return seen

        return list(await asyncio.gather(*(one(call, offset) for call, offset in zip(calls, due))))


async def _reachable(client: Any, endpoint: Endpoint) -> None:
    import httpx

    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ConfigError(f"no server answers at {endpoint.url} ({type(error).__name__}); is it running?") from error
    if response.status_code in (401, 403):
        raise ConfigError(f"the server at {endpoint.url} wants a key; give --api-key")
