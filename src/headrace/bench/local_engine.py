"""An engine in this process, driven through batches and timed."""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.bench.workload import Item
from headrace.core.config import EngineConfig
from headrace.core.errors import HeadraceError
from headrace.core.events import EngineInfo, EngineStats
from headrace.offline.planning.admission import Admission
from headrace.offline.planning.fixed import FixedAdmission
from headrace.perf.model_config import shape_of_folder
from headrace.perf.model_shape import ModelShape

if TYPE_CHECKING:
    from headrace.engine.build import OpenStore


@dataclass(frozen=True)
class BatchRun:
    """What one pass over a batch did.

    Attributes:
        wall_s: from the first request in to the last token out.
        outputs: token ids by custom_id.
        prompt_tokens, output_tokens: of all requests.
        steps, step_seconds, hit_tokens, preemptions: what the engine's counters grew by.
    """

    wall_s: float
    outputs: dict[str, list[int]]
    prompt_tokens: int
    output_tokens: int
    steps: int
    step_seconds: float
    hit_tokens: int
    preemptions: int

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.wall_s


class LocalEngine:
    """Loads an engine and runs batches through it, one at a time.

    Args:
        config: of the engine.
        progress: told how far loading is.
        open_the_store: opens what `config.store` says, where the measurement wants a hand in it.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str, float], None] | None = None,
        open_the_store: "OpenStore | None" = None,
    ) -> None:
        from headrace.engine.build import build, cost_shape
        from headrace.engine.core import Engine
        from headrace.store.opening import open_store

        self.config = config
        parts = build(config, progress, open_the_store or open_store)
        self.decoder = parts.decoder
        self.shape: ModelShape = cost_shape(parts.decoder.shape, parts.group.shape)
        self.engine = Engine(config, parts)
        self._runs = 0

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        return self.engine.info

    def stats(self) -> EngineStats:
        """Its counters now."""
        return self.engine.stats()

    def run(
        self,
        batch: Sequence[Item],
        *,
        salt: str = "",
        advance: Callable[[int], None] | None = None,
        admission: Admission | None = None,
    ) -> BatchRun:
        """Run a batch to its end.

        Args:
            batch: the requests; ids unique.
            salt: runs with different salts share no cached KV, so that a repeat is as cold as the first.
            advance: called with the number of requests that have finished.
            admission: which request the engine gets next; None: in the order of the batch.

        Raises:
            HeadraceError: a request failed or was refused.
        """
        self._runs += 1
        suffix = f"#{self._runs}"
        requests = [msgspec.structs.replace(item.request(suffix), cache_salt=salt) for item in batch]
        numbers = {request.id: number for number, request in enumerate(requests)}
        outputs: dict[str, list[int]] = {request.id: [] for request in requests}
        admission = admission or FixedAdmission(np.arange(len(batch)), self.config.scheduler.max_queue)
        flying: set[str] = set()
        before, start = self.stats(), time.perf_counter()
        while admission.remaining or flying:
            for number in admission.admit():
                self.engine.add(requests[number])
                flying.add(requests[number].id)
            self.engine.limit_offline(admission.step_tokens)
            for delta in self.engine.step():
                outputs[delta.request] += delta.tokens
                if delta.finish == "error":
                    raise HeadraceError(f"request {delta.request.removesuffix(suffix)} failed: {delta.error}")
                if delta.finish is not None:
                    flying.discard(delta.request)
                    admission.finish(numbers[delta.request], len(outputs[delta.request]))
                    if advance is not None:
                        advance(1)
            if flying and admission.follows_progress:
                running = list(flying)
                admission.progress(
                    np.array([numbers[name] for name in running]), np.array([len(outputs[name]) for name in running])
                )
        wall, after = time.perf_counter() - start, self.stats()
        self.engine.limit_offline(None)
        return BatchRun(
            wall_s=wall,
            outputs={name.removesuffix(suffix): tokens for name, tokens in outputs.items()},
            prompt_tokens=sum(len(item.prompt) for item in batch),
            output_tokens=sum(map(len, outputs.values())),
            steps=after.steps_total - before.steps_total,
            step_seconds=after.step_seconds_total - before.step_seconds_total,
            hit_tokens=after.hit_tokens_total - before.hit_tokens_total,
            preemptions=after.preemptions_total - before.preemptions_total,
        )


def warm_up(engine: LocalEngine, batch: Sequence[Item], salt: str = "warm-up") -> None:
    """Run a few short requests of the batch, so that compilation and first touches are not measured."""
    few = sorted(batch, key=lambda item: len(item.prompt))
    chosen = [few[0], few[len(few) // 2], few[-1]]
    short = [
        Item(f"warm-up-{i}", item.prompt, msgspec.structs.replace(item.params, max_tokens=4, min_tokens=0))
        for i, item in enumerate(chosen)
    ]
    engine.run(short, salt=salt)


def tokenizer_of(path: str | Path) -> Any:
    """The model's own tokenizer, from its folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def model_folder(config: EngineConfig) -> Path:
    """The model's folder, fetched where needed."""
    from headrace.model.hub import resolve

    return resolve(config.model.model, config.model.revision)


def with_scheduler(config: EngineConfig, **changes: Any) -> EngineConfig:
    """The configuration with other scheduler settings."""
    return replace(config, scheduler=replace(config.scheduler, **changes))


def with_cache(config: EngineConfig, **changes: Any) -> EngineConfig:
    """The configuration with other cache settings."""
    return replace(config, cache=replace(config.cache, **changes))


def with_pool_of(config: EngineConfig, tokens: int) -> EngineConfig:
    """The configuration with a KV pool of so many tokens of its model, unless it sets the pool's size itself."""
    if config.cache.kv_memory:
        return config
    named = [name for name in (config.cache.kv_dtype, config.model.dtype) if name != "auto"]
    dtype = named[0] if named else "float32"
    return with_cache(config, kv_memory=tokens * shape_of_folder(model_folder(config), dtype).kv_bytes_per_token)


def peak_rss_mb() -> float:
    """The most memory this process has had resident so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
