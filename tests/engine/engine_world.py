"""A real engine over a tiny random-weight model, and ways to drive it."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from headrace.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, StoreConfig
from headrace.core.events import Delta
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.build import EngineParts, OpenStore, build
from headrace.engine.core import Engine
from headrace.engine.kv_flow import KVSink, KVSource
from headrace.engine.pipeline import Span
from headrace.engine.runner import Runner
from headrace.kernels.attention import backend_for
from headrace.model.decoder import Decoder, Forward
from headrace.store.opening import open_store


def config(
    model: Path,
    *,
    kv_bytes: int = 4 << 20,
    page_size: int = 8,
    caching: bool = True,
    dtype: str = "float32",
    store: StoreConfig | None = None,
    overlap: bool = False,
    **scheduler: object,
) -> EngineConfig:
    limits = dataclasses.replace(SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64), **scheduler)
    return EngineConfig(
        model=ModelConfig(model=str(model), threads=1, dtype=dtype, overlap=overlap),
        cache=CacheConfig(kv_memory=kv_bytes, page_size=page_size, prefix_caching=caching),
        scheduler=limits,
        store=store or StoreConfig(store=False),
    )


def engine(
    settings: EngineConfig,
    flow: tuple[KVSource, KVSink] | None = None,
    spans: Callable[[Decoder], Sequence[Span]] | None = None,
    opened: OpenStore = open_store,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Engine, EngineParts]:
    parts = build(settings, open_the_store=opened, clock=clock)
    if flow is not None or spans is not None:
        runner = Runner(
            parts.decoder,
            parts.group,
            backend_for("cpu", threads=1),
            parts.sampler,
            settings.scheduler.max_num_seqs,
            parts.info.max_model_len,
            flow=flow,
            spans=spans(parts.decoder) if spans is not None else None,
            depth=settings.scheduler.pipeline_depth,
        )
        parts = dataclasses.replace(parts, runner=runner)
    return Engine(settings, parts), parts


def request(name: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> Request:
    params: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
    own = {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__struct_fields__}
    return Request(id=name, prompt=prompt, params=SamplingParams(**(params | own)), **fields)  # type: ignore[arg-type]


def drain(
    running: Engine, requests: Sequence[Request] = (), interrupt: Callable[[], bool] | None = None
) -> dict[str, list[Delta]]:
    """Add requests, step until idle, check after every step; deltas by request."""
    for item in requests:
        running.add(item)
    deltas: dict[str, list[Delta]] = {}
    while not running.idle:
        for delta in running.step(interrupt):
            deltas.setdefault(delta.request, []).append(delta)
        running.check()
    return deltas


def tokens(deltas: dict[str, list[Delta]]) -> dict[str, list[int]]:
    return {name: [token for delta in parts for token in delta.tokens] for name, parts in deltas.items()}


class ThreadSpan:
    """A span that computes elsewhere: in a thread, and never before its gate opens. Records who started when."""

    def __init__(self, decoder: Decoder, layers: range, log: list[tuple[str, int]]) -> None:
        self._decoder = decoder
        self._layers = layers
        self._log = log
        self._pool = ThreadPoolExecutor(1)
        self._work: dict[int, Future[None]] = {}
        self.gate = threading.Event()
        self.gate.set()

    @property
    def local(self) -> bool:
        return False

    @property
    def layers(self) -> range:
        return self._layers

    def start(self, fwd: Forward) -> None:
        self._log.append(("start", id(fwd)))
        self._work[id(fwd)] = self._pool.submit(self._run, fwd)

    def finish(self, fwd: Forward, interrupt: Callable[[], bool] | None) -> bool:
        self._work.pop(id(fwd)).result(timeout=60)
        self._log.append(("finish", id(fwd)))
        return True

    def _run(self, fwd: Forward) -> None:
        assert self.gate.wait(60)
        self._decoder.run(fwd, self._layers.start, self._layers.stop)
