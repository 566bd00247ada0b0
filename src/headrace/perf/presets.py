"""Profiles that nobody measured here: data-sheet numbers of accelerators, and an estimate for any CPU."""

import math
from dataclasses import replace

from headrace.core.errors import ConfigError
from headrace.perf.profile import DeviceProfile, monotone_gemm

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

# Data-sheet peaks: dense 16-bit tensor-core FLOP/s, memory bytes/s, streaming multiprocessors, memory bytes. The A100
# is the 80 GB one, with the rates that BlendServe (arXiv 2411.16102) computes densities with.
_ACCELERATORS: dict[str, tuple[float, float, int, int]] = {
    "A100": (312e12, 2.039e12, 108, 80 * 10**9),
    "H100": (989e12, 3.35e12, 132, 80 * 10**9),
    "H200": (989e12, 4.8e12, 132, 141 * 10**9),
    "L40S": (362e12, 0.864e12, 142, 48 * 10**9),
}
# GEMM beside decode attention: with 0.4 of the multiprocessors attention reads at 0.8 of its bandwidth (NanoFlow, arXiv
# 2408.12757, figure 6 and table 3, measured on an A100; for the other devices the same is assumed).
NANOFLOW_OVERLAP = ((0.4, 0.8),)
# Shares of the peak that kernels reach in practice: an estimate, to be replaced by `headrace bench calibrate`.
_GEMM_SHARE, _MEMORY_SHARE, _ATTENTION_SHARE = 0.6, 0.8, 0.4
_FREE = 1e21  # bytes/s that take no time
_TF32_SHARE = 0.5  # float32 through tensor cores

# One AVX2 core of a server, fp32 packed linears, measured on 2 cores and halved (GFLOP/s by rows).
_CPU_CORE_GEMM = ((1, 4e9), (8, 18e9), (32, 41e9), (128, 55e9), (512, 65e9), (1024, 69e9))


def as_run(profile: DeviceProfile, overlap: bool) -> DeviceProfile:
    """A device as an engine uses it: with both kinds of work side by side, or one after the other.

    Calibration does not measure how they disturb each other; where a profile does not say, NanoFlow's figure stands.
    """
    return replace(profile, overlap=(profile.overlap or NANOFLOW_OVERLAP) if overlap else ())


def estimate(device: str, device_name: str, cores: int, threads: int, dtype: str) -> DeviceProfile:
    """A cautious profile of a device that was never calibrated; an unknown accelerator counts as an A100.

    Raises:
        ConfigError: the dtype is unknown.
    """
    if dtype not in _ITEMSIZE:
        raise ConfigError(f"no device profile for dtype {dtype!r}; one of {', '.join(_ITEMSIZE)}")
    if device == "cpu":
        return _cpu(device_name, cores, max(1, threads), dtype)
    for name in _ACCELERATORS:
        if name.lower() in device_name.lower():
            return accelerator(name, dtype)
    return accelerator("A100", dtype)


def accelerator(name: str, dtype: str = "bfloat16", peak: bool = False) -> DeviceProfile:
    """The preset of an accelerator, from its data sheet.

    Args:
        name: as in `names()`; `A100-80G` and the like are understood.
        dtype: of weights and computation.
        peak: the peaks themselves, no overheads, element-wise work free, as papers compute; else the share that kernels
            reach.

    Raises:
        ConfigError: there is no preset of that name.
    """
    name = name.upper().split("-")[0]
    if name not in _ACCELERATORS:
        raise ConfigError(f"no preset for {name!r}; one of {', '.join(_ACCELERATORS)}")
    most, memory, multiprocessors, _ = _ACCELERATORS[name]
    if dtype not in _ITEMSIZE:
        raise ConfigError(f"no device profile for dtype {dtype!r}; one of {', '.join(_ITEMSIZE)}")
    size = _ITEMSIZE[dtype]
    flops = most * (1.0 if peak else _GEMM_SHARE) * (_TF32_SHARE if size == 4 else 1.0)
    bandwidth = memory * (1.0 if peak else _MEMORY_SHARE)
    # Below the ridge a GEMM reads its weights: rows * 2 FLOPs per weight of `size` bytes.
    ridge = math.ceil(flops * size / (2 * bandwidth))
    rows = sorted({1 << power for power in range(14)} | {ridge})
    gemm = tuple((n, min(flops, 2 * n / size * bandwidth)) for n in rows)
    return DeviceProfile(
        device="cuda",
        device_name=name,
        cores=multiprocessors,
        threads=0,
        dtype=dtype,
        gemm=gemm,
        kv_read=bandwidth,
        attention=flops * (1.0 if peak else _ATTENTION_SHARE / _GEMM_SHARE),
        copy=_FREE if peak else bandwidth,
        sum_read=bandwidth,
        step_overhead=0.0 if peak else 2e-3,
        layer_overhead=0.0 if peak else 2e-5,
        measured=False,
        overlap=NANOFLOW_OVERLAP,
    )


def names() -> tuple[str, ...]:
    """The accelerators there are presets of."""
    return tuple(_ACCELERATORS)


def memory_bytes(name: str) -> int:
    """Memory of an accelerator.

    Raises:
        ConfigError: there is no preset of that name.
    """
    known = name.upper().split("-")[0]
    if known not in _ACCELERATORS:
        raise ConfigError(f"no preset for {name!r}; one of {', '.join(_ACCELERATORS)}")
    return _ACCELERATORS[known][3]


def _cpu(device_name: str, cores: int, threads: int, dtype: str) -> DeviceProfile:
    # Compute grows with threads; memory bandwidth does so only for the first few.
    lanes = min(threads, 4)
    return DeviceProfile(
        device="cpu",
        device_name=device_name,
        cores=cores,
        threads=threads,
        dtype=dtype,
        gemm=monotone_gemm([(rows, rate * (lanes if rows < 8 else threads)) for rows, rate in _CPU_CORE_GEMM]),
        kv_read=5e9 * lanes,
        attention=15e9 * threads,
        copy=5e9 * lanes,
        sum_read=10e9 * lanes,
        step_overhead=4e-3,
        layer_overhead=4e-4,
        measured=False,
    )
