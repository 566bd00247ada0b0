"""Measures what this device can do, into a `DeviceProfile`."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.bench.local_engine import LocalEngine
from headrace.bench.progress import progress
from headrace.bench.tiny_models import VOCABULARY, save
from headrace.bench.workload import items
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.errors import ConfigError
from headrace.core.events import EngineInfo
from headrace.model.linears import PackedLinear
from headrace.perf.profile import DeviceProfile, available_cores, cpu_name, load_or_default, monotone_gemm

GEMM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Weights of a small model's layer as (out, in): attention in, attention out, MLP up and gate, MLP down.
_LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
# So many layers of them that no cache holds the weights of the next one: 170 MB in fp32.
_LAYERS = 12
_SUM_BYTES = 256_000_000
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def calibrate(device: str = "cpu", threads: int = 0, dtype: str = "float32") -> DeviceProfile:
    """Measure this device, in under a minute.

    Args:
        device: `cpu` or `cuda`; `auto`: cuda where there is one.
        threads: CPU threads; 0: all cores.
        dtype: of weights and computation; `auto`: float32 on CPU, bfloat16 on CUDA.

    Raises:
        ConfigError: there is no such device or dtype.
    """
    device, dtype = _resolve(device, dtype)
    cores = available_cores()
    used = (threads or cores) if device == "cpu" else 0
    if used:
        torch.set_num_threads(used)
    with torch.inference_mode(), progress(f"calibrating {device}, {dtype}", len(GEMM_ROWS) + 2) as advance:
        gemm = measure_gemm(device, dtype, GEMM_ROWS, advance)
        copy, total = measure_copy(device), measure_sum(device)
        advance(1)
        kv_read, attention = measure_attention(device, dtype, used)
        advance(1)
    step, layer = measure_overhead(device, dtype, used)
    name = cpu_name() if device == "cpu" else torch.cuda.get_device_name()
    return DeviceProfile(
        device=device,
        device_name=name,
        cores=cores if device == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count,
        threads=used,
        dtype=dtype,
        gemm=gemm,
        kv_read=kv_read,
        attention=attention,
        copy=copy,
        sum_read=total,
        step_overhead=step,
        layer_overhead=layer,
    )


def roofline_profile(info: EngineInfo, config: EngineConfig) -> DeviceProfile:
    """The calibrated profile of an engine's device; where there is none, what a roofline needs is measured now."""
    threads = config.model.threads or (available_cores() if info.device == "cpu" else 0)
    name = cpu_name() if info.device == "cpu" else torch.cuda.get_device_name()
    profile = load_or_default(info.device, threads, info.dtype, name)
    if profile.measured:
        return profile
    with torch.inference_mode():
        gemm = measure_gemm(info.device, info.dtype, (64, 128, 256, 512))
        return replace(profile, gemm=gemm, sum_read=measure_sum(info.device), measured=True)


def measure_gemm(
    device: str, dtype: str, rows: tuple[int, ...], advance: Callable[[int], None] | None = None
) -> tuple[tuple[int, float], ...]:
    """(rows, FLOP/s) of a layer's linears, made as the model room makes them, over weights that no cache holds."""
    kind = _DTYPES[dtype]
    layers = [[_linear(out, inner, device, kind) for out, inner in _LAYER] for _ in range(_LAYERS)]
    flops_per_row = 2 * _LAYERS * sum(out * inner for out, inner in _LAYER)
    points = []
    for count in rows:
        inputs = [torch.randn(count, inner, device=device).to(kind) for _, inner in _LAYER]

        def run(inputs: list[Tensor] = inputs) -> None:
            for layer in layers:
                for linear, x in zip(layer, inputs):
                    linear(x)

        points.append((count, count * flops_per_row / _best(run, device, repeats=_repeats(count))))
        if advance is not None:
            advance(1)
    return monotone_gemm(points)


def measure_sum(device: str) -> float:
    """Bytes/s of `torch.sum` over 256 MB of float32: the roofline's memory bandwidth."""
    numbers = torch.ones(_SUM_BYTES // 4, device=device)
    return _SUM_BYTES / _best(lambda: torch.sum(numbers), device, repeats=7)


def measure_copy(device: str) -> float:
    """Bytes/s, read plus written, of a 256 MB copy."""
    source = torch.ones(_SUM_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _SUM_BYTES / _best(lambda: target.copy_(source), device, repeats=5)


def measure_attention(device: str, dtype: str, threads: int) -> tuple[float, float]:
    """Bytes/s of KV that decode attention reads, and FLOP/s of prefill attention, through the engine's kernels."""
    from headrace.kernels.attention import backend_for
    from headrace.kernels.measure import measure

    rates = measure(backend_for(device, threads=threads), kv_dtype=dtype, rounds=5, layers=8)
    return rates["decode_batch_gb_s"] * 1e9, rates["prefill_3072_gflop_s"] * 1e9


def measure_overhead(device: str, dtype: str, threads: int) -> tuple[float, float]:
    """Seconds of a step and of a layer that are left when there is next to nothing to compute.

    Two tiny models of 2 and 12 layers decode one sequence through the whole engine; the difference is the layers'.
    """
    few, many, steps = 2, 12, 150
    times = {}
    with tempfile.TemporaryDirectory() as scratch:
        for layers in (few, many):
            folder = save("llama", Path(scratch) / str(layers), num_hidden_layers=layers)
            model = ModelConfig(model=str(folder), dtype=dtype, device=device, threads=threads)
            times[layers] = _least_step(LocalEngine(EngineConfig(model=model)), steps)
    layer = max(0.0, (times[many] - times[few]) / (many - few))
    return max(0.0, times[few] - few * layer), layer


def _least_step(engine: LocalEngine, steps: int) -> float:
    """Seconds of the fastest of many decode steps of one sequence."""
    (item,) = items([([5 % VOCABULARY, 7, 9], steps)])
    engine.run([item])
    times = []
    engine.engine.add(item.request("-timed"))
    while not engine.engine.idle:
        start = time.perf_counter()
        engine.engine.step()
        times.append(time.perf_counter() - start)
    return min(times)


def _repeats(rows: int) -> int:
    """Small products are quick and the ones that noise distorts most."""
    return 15 if rows <= 32 else 7 if rows <= 128 else 4


def _linear(out: int, inner: int, device: str, kind: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(out, inner, device=device).to(kind)
    if device == "cpu":
        return PackedLinear(weight, None)
    return lambda x: torch.nn.functional.linear(x, weight)


def _best(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Seconds of a run: the least of several, since a shared machine only ever adds time."""
    run()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _resolve(device: str, dtype: str) -> tuple[str, str]:
    there = torch.cuda.is_available()
    device = ("cuda" if there else "cpu") if device == "auto" else device
    if device == "cuda" and not there:
        raise ConfigError("no CUDA device is here; use --device cpu")
    dtype = ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} cannot be calibrated; one of {', '.join(_DTYPES)}")
    return device, dtype


def load_average() -> float:
    """Processes that wanted a core in the last minute: a calibration beside others measures what they leave."""
    return os.getloadavg()[0]
