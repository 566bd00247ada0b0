"""A long prompt asked again after the server was restarted and the page cache dropped: what the KV store gives back."""

import asyncio
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from headrace.bench.disk import drop_page_cache, read_rate
from headrace.bench.latency_stats import Observed
from headrace.bench.local_engine import model_folder, tokenizer_of
from headrace.bench.parity_prompts import pseudo_text
from headrace.bench.progress import progress
from headrace.bench.server_process import free_port, running_server
from headrace.bench.stream_client import Endpoint, stream
from headrace.bench.workload import COMPLETIONS
from headrace.core.config import Config, EngineConfig, ServerConfig
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.paths import home
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.spec import TierSpec, parse_spec, show_spec
from headrace.store.tiers.tier import Scanned

#: The bound: this many times as long as the disk takes for the bytes, and so many decode steps.
READ_FACTOR, DECODE_STEPS = 1.3, 2
_COUNTED_AFTER_S = 10.0


@dataclass(frozen=True)
class Asked:
    """The prompt asked of one server.

    Attributes:
        seen: what the client saw.
        bytes_read: from the tier, as the server counts.
        device_bytes: what the server's processes read from block devices meanwhile, as the kernel counts.
    """

    seen: Observed
    bytes_read: int
    device_bytes: int

    @property
    def step_s(self) -> float:
        """Seconds of a decode step."""
        return median(self.seen.gaps)


@dataclass(frozen=True)
class Restored:
    """A prompt computed by one server, and served by the next.

    Attributes:
        cold, warm: the two.
        kv_bytes: bytes of the parts that hold the prompt's full chunks.
        tokens: tokens of these.
        disk_rate: bytes per second that the disk gave right before and after the warm server's turn.
    """

    cold: Asked
    warm: Asked
    kv_bytes: int
    tokens: int
    disk_rate: float

    @property
    def limit_s(self) -> float:
        """The longest that the time to first token may be."""
        return READ_FACTOR * self.kv_bytes / self.disk_rate + DECODE_STEPS * self.warm.step_s

    @property
    def same(self) -> bool:
        """Both gave the same text."""
        return self.cold.seen.text == self.warm.seen.text

    @property
    def exact(self) -> bool:
        """What was needed was read, and nothing else."""
        return self.warm.bytes_read == self.kv_bytes and self.warm.seen.cached_tokens == self.tokens


def summary(rounds: Sequence[Restored]) -> dict[str, Any]:
    """Medians over the rounds."""

    def mid(values: Iterator[float]) -> float:
        return median(list(values))

    return {
        "ttft_cold_s": round(mid(r.cold.seen.ttft for r in rounds), 4),
        "ttft_warm_s": round(mid(r.warm.seen.ttft for r in rounds), 4),
        "limit_s": round(mid(r.limit_s for r in rounds), 4),
        "ttft_over_limit": round(mid(r.warm.seen.ttft / r.limit_s for r in rounds), 4),
        "speedup": round(mid(r.cold.seen.ttft / r.warm.seen.ttft for r in rounds), 2),
        "disk_gb_per_s": round(mid(r.disk_rate for r in rounds) / 1e9, 4),
        "disk_s": round(mid(r.kv_bytes / r.disk_rate for r in rounds), 4),
        "decode_step_s": round(mid(r.warm.step_s for r in rounds), 4),
        "kv_bytes": rounds[-1].kv_bytes,
        "bytes_read": rounds[-1].warm.bytes_read,
        "device_bytes": rounds[-1].warm.device_bytes,
        "bytes_as_needed": all(r.exact for r in rounds),
        "same_text": all(r.same for r in rounds),
        "cached_tokens": rounds[-1].warm.seen.cached_tokens,
        "rounds": len(rounds),
        "each": [
            [round(x, 4) for x in (r.cold.seen.ttft, r.warm.seen.ttft, r.limit_s, r.disk_rate / 1e9)] for r in rounds
        ],
    }


def measure(config: EngineConfig, prompt_tokens: int = 4000, outputs: int = 24, rounds: int = 5) -> list[Restored]:
    """Per round: a server computes a new prompt and ends, writing what waits; the next is asked the same.

    The tier is one folder, empty at first; the disk's rate is measured on the files themselves, before and after.

    Raises:
        ConfigError: more than one tier is asked for, or not a `dir`.
        HeadraceError: a request failed, or the first server did not save the prompt.
    """
    spec = _spec(config.store.tier)
    tokenizer = tokenizer_of(config.model.tokenizer or model_folder(config))
    results = []
    with progress("restarts", rounds) as advance:
        for number in range(rounds):
            prompt = tokenizer.encode(pseudo_text(prompt_tokens, seed=number))
            while len(prompt) < prompt_tokens:
                prompt += prompt
            results.append(_round(config, spec, prompt[:prompt_tokens], outputs))
            advance(1)
    return results


def _spec(texts: Sequence[str]) -> TierSpec:
    if not texts:
        return TierSpec("dir", 4 << 30, home())
    spec = parse_spec(texts[0])
    if len(texts) > 1 or spec.path is None or spec.throttle is not None:
        raise ConfigError(f"--tier: {' '.join(texts)} is not one folder; give one, such as dir:/mnt/nvme:4GiB")
    return spec


def _round(config: EngineConfig, spec: TierSpec, prompt: list[int], outputs: int) -> Restored:
    with _scratch(spec) as own:
        config = replace(config, store=replace(config.store, store=True, tier=(show_spec(own),)))
        cold = _ask(config, prompt, outputs, needed=0)
        assert own.path is not None
        tier = DirTier(own.path, own.capacity, own.scope)
        full = (len(prompt) - 1) // config.store.chunk_tokens
        parts = list(tier.scan())
        if len(parts) < full:
            raise HeadraceError(f"of {full} chunks of the prompt {len(parts)} were saved; make the tier larger")
        return _again(config, tier, parts, full, prompt, outputs, cold)


def _again(
    config: EngineConfig, tier: DirTier, parts: list[Scanned], full: int, prompt: list[int], outputs: int, cold: Asked
) -> Restored:
    needed = full * parts[0].nbytes  # all are of one size; there may be one more than the prompt's
    drop_page_cache(tier.folder)
    before = read_rate(tier, parts)
    warm = _ask(config, prompt, outputs, needed, tier.folder)
    drop_page_cache(tier.folder)
    after = read_rate(tier, parts)
    rate = 2 / (1 / before + 1 / after)
    return Restored(cold, warm, needed, full * config.store.chunk_tokens, rate)


@contextmanager
def _scratch(spec: TierSpec) -> Iterator[TierSpec]:
    """The same tier in an empty folder inside the one given; it goes at the end."""
    assert spec.path is not None
    try:
        spec.path.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=spec.path)
    except OSError as error:
        raise ConfigError(f"cannot write to folder {spec.path}: {error.strerror}; give another") from error
    with scratch as folder:
        yield replace(spec, path=Path(folder))


def _ask(config: EngineConfig, prompt: list[int], outputs: int, needed: int, drop: Path | None = None) -> Asked:
    """Start a server, ask the prompt once, and end the server, which then writes what waits.

    Args:
        config: of the server.
        prompt: token ids.
        outputs: tokens to generate.
        needed: bytes that will be read from the tier; its counters are read until they show them.
        drop: a folder whose files are taken out of the page cache just before the request.
    """
    server = replace(ServerConfig(), port=free_port(), log_level="warning")
    with running_server(Config(config, server)) as url:
        if drop is not None:
            drop_page_cache(drop)
        return asyncio.run(_one(url, prompt, outputs, needed))


async def _one(url: str, prompt: list[int], outputs: int, needed: int) -> Asked:
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": outputs,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,  # so that a token whose text is held back is seen when it comes
    }
    async with Endpoint(url).client() as client:
        (await client.get("/health")).raise_for_status()  # the connection is made
        device = _device_bytes()
        seen = await stream(client, COMPLETIONS, body, time.perf_counter())
        if seen.error is not None or len(seen.arrivals) < 2:
            raise HeadraceError(f"the prompt failed: {seen.error or 'too little output'}")
        device = _device_bytes() - device
        until = time.monotonic() + _COUNTED_AFTER_S
        while (read := await _tier_bytes(client)) < needed and time.monotonic() < until:
            continue
    return Asked(seen, read, device)


async def _tier_bytes(client: httpx.AsyncClient) -> int:
    """Bytes read from the tier since the server's start, from `/metrics`."""
    text = (await client.get("/metrics")).text
    values = re.findall(r"^headrace:store_tier_read_bytes_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return sum(int(float(value)) for value in values)


def _device_bytes() -> int:
    """Bytes that the processes below this one have read from block devices."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        try:
            total += child.io_counters().read_bytes
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has just ended, or is not ours to look at
    return total
