"""What a device can do, measured once by `headrace bench calibrate` and read by schedulers and rooflines."""

import math
import os
import re
import tempfile
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from headrace.core import paths
from headrace.core.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True)
class DeviceProfile:
    """Rates of one device, with a given number of threads, in one dtype.

    Attributes:
        device: `cpu` or `cuda`.
        device_name: the processor's own name.
        cores: cores of the machine (CPU) or multiprocessors (GPU).
        threads: threads that computed; 0 where that means nothing.
        dtype: of weights and computation, e.g. `float32`.
        gemm: (rows, FLOP/s) of the packed linears of a layer, rows ascending.
        kv_read: bytes/s at which decode attention reads paged KV.
        attention: FLOP/s of causal prefill attention.
        copy: bytes/s of a large copy, read plus written.
        sum_read: bytes/s of `torch.sum` over 256 MB: the most a plain read of memory gives.
        step_overhead: seconds of a step that depend on neither rows nor layers.
        layer_overhead: seconds per layer that do not depend on rows (dispatch of its operators).
        measured: False where the numbers are a preset or an estimate.
        overlap: how compute- and memory-bound work runs side by side, as (share of the units, rate) points: while
            attention has this share of the device's units, linears run at the rest of their rate and KV is read at
            `rate` of its bandwidth. Empty: not side by side, times add up (one pool of cores serves both on a CPU).
    """

    device: str
    device_name: str
    cores: int
    threads: int
    dtype: str
    gemm: tuple[tuple[int, float], ...]
    kv_read: float
    attention: float
    copy: float
    sum_read: float
    step_overhead: float
    layer_overhead: float
    measured: bool = True
    overlap: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be a measurement."""
        if not self.gemm:
            raise ConfigError("a device profile needs at least one gemm point (rows, FLOP/s)")
        rows = [point[0] for point in self.gemm]
        if rows[0] < 1 or any(a >= b for a, b in pairwise(rows)):
            raise ConfigError(f"gemm rows of a device profile must ascend from at least 1, got {rows}")
        if any(n1 / r1 < n0 / r0 * (1 - 1e-9) for (n0, r0), (n1, r1) in pairwise(self.gemm) if r0 > 0 and r1 > 0):
            raise ConfigError("gemm of a device profile: more rows must not take less time; calibrate again")
        rates = {f"gemm at {n} rows": rate for n, rate in self.gemm}
        rates |= {name: getattr(self, name) for name in ("kv_read", "attention", "copy", "sum_read")}
        for name, rate in rates.items():
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(f"{name} of a device profile must be a positive number, got {rate}")
        for name in ("step_overhead", "layer_overhead"):
            seconds = getattr(self, name)
            if not 0 <= seconds < 60:
                raise ConfigError(f"{name} of a device profile must be between 0 and 60 seconds, got {seconds}")
        for share, rate in self.overlap:
            if not (0 <= share < 1 and 0 < rate <= 1):
                raise ConfigError(f"overlap of a device profile: a share in 0..1 and its rate, got ({share}, {rate})")

    def gemm_rate(self, rows: float) -> float:
        """FLOP/s of a linear over this many rows (a mean may be a fraction).

        Between two measured points the *time* is interpolated over rows, so it never falls when rows grow; below the
        first and above the last point the rate is theirs.
        """
        points = self.gemm
        if rows <= points[0][0]:
            # One row takes as long as the fewest measured rows would per row: weights are read once either way.
            return points[0][1]
        if rows >= points[-1][0]:
            return points[-1][1]
        right = bisect_left([n for n, _ in points], rows)
        (n0, r0), (n1, r1) = points[right - 1], points[right]
        t0, t1 = n0 / r0, n1 / r1
        time = t0 + (t1 - t0) * (rows - n0) / (n1 - n0)
        return rows / time

    def best_gemm_rate(self, max_rows: int = 512) -> float:
        """The highest measured rate at no more than `max_rows` rows.

        Raises:
            ConfigError: nothing was measured at so few rows.
        """
        rates = [rate for rows, rate in self.gemm if rows <= max_rows]
        if not rates:
            raise ConfigError(f"the device profile has no gemm point at {max_rows} rows or fewer; calibrate again")
        return max(rates)


def monotone_gemm(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Measured (rows, FLOP/s) made consistent: more rows never take less time.

    A noisy machine can measure 64 rows as slower than 96; a step-time model must not conclude that adding rows saves
    time. Each point's time is lowered to the least time of any point with more rows.
    """
    ordered = sorted(points)
    floor = math.inf
    kept: list[tuple[int, float]] = []
    for rows, rate in reversed(ordered):
        floor = min(floor, rows / rate)
        kept.append((rows, rows / floor))
    return tuple(reversed(kept))


def cpu_name() -> str:
    """The processor's name from `/proc/cpuinfo`, or `cpu` where there is none."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return "cpu"  # not Linux: the name only labels the profile
    return "cpu"


def path_of(device: str, threads: int, dtype: str) -> Path:
    """The file that holds this device's profile. Not created here."""
    for name, value in (("device", device), ("dtype", dtype)):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", value):
            raise ConfigError(f"{name} of a profile must be a plain word, got {value!r}")
    return paths.home() / "profiles" / f"{device}-{threads}-{dtype}.json"


def save(profile: DeviceProfile, path: Path | None = None) -> Path:
    """Write the profile where `load_or_default` finds it (or to `path`); readers see the old file or the new one."""
    target = path or path_of(profile.device, profile.threads, profile.dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, **msgspec.to_builtins(profile)}
    text = msgspec.json.format(msgspec.json.encode(document), indent=2)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text + b"\n")
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def load(path: Path) -> DeviceProfile:
    """Read a profile.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: the file is not a profile of this format, or holds impossible numbers.
    """
    way_out = "run `headrace bench calibrate` or delete the file"
    try:
        document: Any = msgspec.json.decode(path.read_bytes())
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ConfigError(f"device profile {path} is not of format {FORMAT}; {way_out}")
        unknown = set(document) - set(DeviceProfile.__dataclass_fields__)
        if unknown:
            raise ConfigError(f"device profile {path} has an unknown key {sorted(unknown)[0]!r}; {way_out}")
        return msgspec.convert(document, DeviceProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"device profile {path} cannot be read ({error}); {way_out}") from error


def load_or_default(device: str, threads: int, dtype: str, device_name: str | None = None) -> DeviceProfile:
    """The measured profile of this device where there is one, else an estimate.

    Args:
        device: `cpu` or `cuda`.
        threads: threads of the engine; 0: all cores (CPU).
        dtype: e.g. `float32`.
        device_name: the accelerator's name; default: the CPU's. A profile measured on another device is not used.

    Raises:
        ConfigError: there is a profile file but it is broken.
    """
    from headrace.perf.presets import estimate

    cores = available_cores()
    used = threads or (cores if device == "cpu" else 0)
    name = device_name or (cpu_name() if device == "cpu" else device)
    try:
        profile = load(path_of(device, used, dtype))
    except FileNotFoundError:
        return estimate(device, name, cores, used, dtype)
    if device_name is None and device != "cpu":
        return profile
    return profile if profile.device_name == name else estimate(device, name, cores, used, dtype)


def available_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
