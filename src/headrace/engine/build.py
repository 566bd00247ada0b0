"""From a configuration to the parts of an engine: load the model, size the pool, wire them up."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from headrace.core.config import EngineConfig, StoreConfig, check
from headrace.core.errors import ConfigError
from headrace.core.events import EngineInfo
from headrace.engine.graphs import DecodePath, GraphRecorder
from headrace.engine.kv_group import KVGroup, KVShape
from headrace.engine.prefix_index import PageHasher
from headrace.engine.runner import Runner
from headrace.engine.sampling import Sampler
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence_pages import SequencePages
from headrace.engine.store_flow import StoreFlow
from headrace.kernels.attention import backend_for
from headrace.kernels.device_streams import HostPinning
from headrace.model import hub
from headrace.model.decoder import Decoder
from headrace.model.loader import estimate, load
from headrace.model.progress import Progress as HubProgress
from headrace.model.shape import ModelShape
from headrace.perf.model_shape import ModelShape as CostShape
from headrace.perf.presets import as_run
from headrace.perf.profile import cpu_name, load_or_default
from headrace.perf.step_time import StepTimeModel
from headrace.store.layout import KVLayout
from headrace.store.opening import OpenedStore, open_store
from headrace.store.tiers.spec import check_specs

#: KV memory where nothing is said: on CPU, which others use too, a share of what is free, up to a limit; on a device,
#: ours but for activations, a larger share, up to so many times what all sequences hold at their longest.
KV_SHARE, KV_MOST = 0.4, 4 << 30
DEVICE_KV_SHARE, DEVICE_KV_TIMES = 0.8, 4
#: Of the pool, what is in memory before the first request: as much as a sequence may hold, up to so many bytes.
READY_BYTES = 512 << 20

#: Called with a phase and how much of it is done, 0..1.
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of."""

    info: EngineInfo
    decoder: Decoder
    group: KVGroup
    sampler: Sampler
    scheduler: Scheduler
    runner: Runner
    flow: StoreFlow | None = None


#: Opens the KV store of an engine from its configuration and the layout of its KV; None: there is none.
OpenStore = Callable[[StoreConfig, KVLayout], OpenedStore | None]


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    open_the_store: OpenStore = open_store,
    clock: Callable[[], float] = time.monotonic,
    sharers: int = 1,
) -> EngineParts:
    """Load the model and make the parts.

    Args:
        config: of the engine.
        progress: told how far loading is.
        open_the_store: opens what `config.store` says.
        clock: seconds that never run backwards; how long a sequence waits for another engine goes by it.
        sharers: engines that are about to load on this host, this one counted: each takes its part of the free memory.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: the numbers do not fit the model or the machine.
    """
    begun = time.perf_counter()
    model, cache, limits = config.model, config.cache, config.scheduler
    check(config)
    if config.store.store:
        check_specs(config.store.tier)
    tell = progress or (lambda phase, done: None)
    device = model.device if model.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    threads = model.threads or len(os.sched_getaffinity(0))
    path = hub.resolve(model.model, model.revision, lambda report: tell(report.phase, fraction(report)))
    tokenizer = hub.resolve_tokenizer(model.tokenizer, model.revision) if model.tokenizer else path
    need = estimate(path, model.dtype)
    available = free_memory(device, sharers)
    tell(f"load {need.weight_bytes / 2**20:,.0f} MiB of weights ({available / 2**20:,.0f} MiB of memory free)", 0.0)
    needed = need.peak_bytes if device == "cpu" else need.weight_bytes
    if needed > available:
        raise ConfigError(
            f"{model.model} needs {needed / 2**30:.1f} GiB to load, {available / 2**30:.1f} GiB are free; "
            "choose a smaller model or --dtype bfloat16"
        )
    decoder = load(
        path,
        dtype=model.dtype,
        device=device,
        threads=threads,
        max_model_len=model.max_model_len,
        progress=progress,
    )
    shape = decoder.shape
    backend = backend_for(device, threads=threads)
    kv_dtype = shape.dtype if cache.kv_dtype == "auto" else cache.kv_dtype
    backend.warmup(cache.page_size, kv_dtype)
    kv_shape = KVShape.stored_by(
        backend, range(shape.num_layers), range(shape.kv_heads), shape.head_dim, cache.page_size, kv_dtype
    )
    pages, max_model_len = _size(config, kv_shape, shape, device, sharers)
    group = KVGroup(kv_shape, pages, backend, device)
    group.commit(min(max_model_len * kv_shape.token_bytes, READY_BYTES))
    sampler = Sampler(shape.vocab_size, shape.eos_ids, str(tokenizer), threads)
    device_name = cpu_name() if device == "cpu" else torch.cuda.get_device_name()
    # Profiles of accelerators say nothing of the host's threads.
    profile = load_or_default(device, threads if device == "cpu" else 0, shape.dtype, device_name)
    twin = backend_for(device, threads=threads) if model.overlap and limits.pipeline_depth == 1 else None
    overlap = twin is not None and device != "cpu"  # on a CPU the halves take turns
    sequence_pages = SequencePages(
        group.allocator,
        group.index,
        PageHasher(shape.fingerprint, cache.page_size),
        cache.page_size,
        cache.prefix_caching,
    )
    times = StepTimeModel(as_run(profile, overlap), cost_shape(shape, kv_shape))
    opened = open_the_store(config.store, store_layout(config.store, shape, kv_shape)) if cache.prefix_caching else None
    flow = None
    if opened is not None:
        if device != "cpu":
            opened.store.pin(HostPinning(device))
        flow = StoreFlow(
            opened.store,
            group,
            backend,
            sequence_pages,
            config.store.chunk_tokens,
            lambda start, length: times.seconds(times.prefill(start, length)) * scheduler.correction,
            recompute=config.store.recompute and config.store.load_overlap,
            clock=clock,
        )
    scheduler = Scheduler(
        limits,
        sequence_pages,
        max_model_len,
        shape.eos_ids,
        times,
        flow.stored if flow is not None else None,
        flow.meet if flow is not None else None,
        flow.claim if flow is not None else None,
        flow.leave if flow is not None else None,
    )
    decode_path = None
    if device != "cpu" and model.cuda_graphs and limits.pipeline_depth == 1:
        decode_path = DecodePath(
            decoder, group, backend, limits.max_num_seqs, max_model_len, GraphRecorder(decoder.device)
        )
    runner = Runner(
        decoder,
        group,
        backend,
        sampler,
        limits.max_num_seqs,
        max_model_len,
        depth=limits.pipeline_depth,
        decode_path=decode_path,
        twin=twin,
    )
    info = EngineInfo(
        model=model.model,
        path=str(path),
        fingerprint=shape.fingerprint,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=list(shape.eos_ids),
        dtype=shape.dtype,
        device=device,
        page_size=cache.page_size,
        pages=pages,
        kv_bytes=group.nbytes,
        weight_bytes=shape.weight_bytes,
        load_seconds=time.perf_counter() - begun,
        pid=os.getpid(),
        store=opened.words if opened is not None else "",
        device_name=device_name,
        overlap=overlap,
    )
    return EngineParts(info, decoder, group, sampler, scheduler, runner, flow)


def store_layout(config: StoreConfig, shape: ModelShape, kv: KVShape) -> KVLayout:
    """The KV of a model as it is stored: the same for every backend and page size."""
    return KVLayout(
        fingerprint=hashlib.sha256(f"{shape.fingerprint} kv {kv.dtype}".encode()).hexdigest(),
        layers=shape.num_layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=kv.dtype,
        chunk_tokens=config.chunk_tokens,
    )


def free_memory(device: str, sharers: int = 1) -> int:
    """Bytes free on the device; on a host that lacks the device asked for, of the host (`load` refuses that).

    Of the host's memory each of the engines that are about to load there gets its part; a device has one engine.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return int(psutil.virtual_memory().available) // sharers
    torch.cuda.empty_cache()  # what loading has used and given back counts as free
    return int(torch.cuda.mem_get_info()[0])


def default_kv_bytes(device: str, free: int, longest: int) -> int:
    """Bytes of the KV pool where none are asked for.

    Args:
        device: `cpu` or `cuda`.
        free: bytes free there.
        longest: bytes that all sequences hold at their longest.
    """
    if device == "cpu":
        return min(int(free * KV_SHARE), KV_MOST)
    return min(int(free * DEVICE_KV_SHARE), DEVICE_KV_TIMES * longest)


def fraction(report: HubProgress) -> float:
    """How much of a hub phase is done, 0..1."""
    return 1.0 if report.finished else (report.done / report.total if report.total else 0.0)


def cost_shape(shape: ModelShape, kv: KVShape) -> CostShape:
    """The numbers that times are predicted from."""
    windows = [window for window in shape.windows if window is not None]
    return CostShape(
        layers=shape.num_layers,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        linear_params=shape.linear_params,
        head_params=shape.head_params,
        query_width=shape.heads * shape.head_dim,
        kv_width=shape.kv_heads * shape.head_dim,
        weight_itemsize=shape.itemsize,
        kv_itemsize=kv.itemsize,
        window=max(windows, default=0),
        window_layers=len(windows),
    )


def _size(config: EngineConfig, kv: KVShape, shape: ModelShape, device: str, sharers: int) -> tuple[int, int]:
    """Pages of the pool, and the longest sequence it takes."""
    asked = config.cache.kv_memory
    free = free_memory(device, sharers)
    nbytes = asked or default_kv_bytes(
        device, free, config.scheduler.max_num_seqs * shape.max_position * kv.token_bytes
    )
    if asked > free:
        raise ConfigError(f"--kv-memory is {asked / 2**30:.2f} GiB, only {free / 2**30:.2f} GiB of memory are free")
    pages = kv.pages_in(nbytes)
    fits = pages * kv.page_size
    if config.model.max_model_len > fits:
        raise ConfigError(
            f"--kv-memory of {nbytes / 2**20:.0f} MiB holds {fits} tokens, less than --max-model-len "
            f"{config.model.max_model_len}; raise the one or lower the other"
        )
    if fits < 2:
        raise ConfigError(f"--kv-memory of {nbytes} bytes holds no page of {kv.page_bytes} bytes; raise it")
    return pages, min(shape.max_position, fits)


__all__ = ["EngineParts", "build", "cost_shape"]
