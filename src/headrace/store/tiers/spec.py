"""Tiers as they are written on the command line.

    memory:4GiB
    dir:/mnt/nvme:100GiB            dir:/mnt/lustre:2TiB:cluster
    throttled:600MB/s:memory:1GiB   throttled:250MB/s@2s,80MB/s@1s,latency=1ms,depth=4,write=100MB/s:dir:/tmp/t:1GiB

A throttled tier's rates hold for their durations, one after the other, over and over.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.settings import format_duration, format_size, nearest, parse_duration, parse_size
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.memory import SHARED_MEMORY, MemoryTier
from headrace.store.tiers.rates import Steps
from headrace.store.tiers.throttled import ThrottledTier
from headrace.store.tiers.tier import Scope, Tier

_KINDS = ("memory", "dir", "throttled")
_SMALLEST = 1 << 20
_HOW = "write memory:4GiB or dir:/path:100GiB"


@dataclass(frozen=True)
class Throttle:
    """How slow a tier is made: `(rate, seconds)` in turn (seconds 0: for ever), and what `ThrottledTier` takes."""

    rates: tuple[tuple[float, float], ...]
    latency: float = 0.0
    depth: int | None = None
    write: float | None = None

    @property
    def bandwidth(self) -> Steps:
        """The rate over time."""
        if self.rates[0][1] == 0:
            return Steps(((0.0, self.rates[0][0]),))
        changes, at = [], 0.0
        for rate, seconds in self.rates:
            changes.append((at, rate))
            at += seconds
        return Steps(tuple(changes), at)


@dataclass(frozen=True)
class TierSpec:
    """A tier as configured.

    Attributes:
        kind: `memory` or `dir`.
        capacity: bytes.
        path: of a `dir`.
        scope: who sees it.
        throttle: how slow it is made, if at all.
    """

    kind: str
    capacity: int
    path: Path | None = None
    scope: Scope = "node"
    throttle: Throttle | None = None


def parse_spec(text: str) -> TierSpec:
    """The tier that a text says.

    Raises:
        ConfigError: it says none.
    """
    kind, _, rest = text.partition(":")
    if kind == "memory":
        return TierSpec("memory", _capacity(text, rest))
    if kind == "dir":
        scope: Scope = "node"
        for word in ("node", "cluster"):
            if rest.endswith(f":{word}"):
                rest = rest.removesuffix(f":{word}")
                scope = "cluster" if word == "cluster" else "node"
                break
        path, _, size = rest.rpartition(":")
        if not path:
            raise ConfigError(f"tier {text!r} lacks a path or a size; write dir:/path:100GiB")
        return TierSpec("dir", _capacity(text, size), Path(path), scope)
    if kind == "throttled":
        options, _, inner = rest.partition(":")
        if inner.startswith("throttled"):
            raise ConfigError(f"tier {text!r} is throttled twice; once is enough")
        spec = parse_spec(inner)
        return TierSpec(spec.kind, spec.capacity, spec.path, spec.scope, _throttle(text, options))
    raise ConfigError(f"unknown tier {text!r}{nearest(kind, _KINDS)}; {_HOW}")


def show_spec(spec: TierSpec) -> str:
    """The text that `parse_spec` reads back."""
    text = f"{spec.kind}:{format_size(spec.capacity)}"
    if spec.path is not None:
        text = f"dir:{spec.path}:{format_size(spec.capacity)}{':cluster' if spec.scope == 'cluster' else ''}"
    if spec.throttle is None:
        return text
    words = [
        f"{format_size(int(rate))}/s" + (f"@{format_duration(seconds)}" if seconds else "")
        for rate, seconds in spec.throttle.rates
    ]
    if spec.throttle.latency:
        words.append(f"latency={format_duration(spec.throttle.latency)}")
    if spec.throttle.depth:
        words.append(f"depth={spec.throttle.depth}")
    if spec.throttle.write:
        words.append(f"write={format_size(int(spec.throttle.write))}/s")
    return f"throttled:{','.join(words)}:{text}"


def build_tiers(specs: Sequence[str], home: Path) -> list[Tier]:
    """The tiers that texts say, in their order.

    Args:
        specs: see above.
        home: `HEADRACE_HOME`; memory tiers are shared by the processes that have the same one.

    Raises:
        ConfigError: a text is wrong, a folder is given twice, or a tier cannot be made.
    """
    parsed = check_specs(specs)
    store = blake2b(str(home.expanduser().resolve()).encode(), digest_size=8).hexdigest()
    tiers: list[Tier] = []
    memories = 0
    for spec in parsed:
        tier: Tier
        if spec.path is not None:
            tier = DirTier(spec.path, spec.capacity, spec.scope)
        else:
            memories += 1
            name = "memory" if memories == 1 else f"memory-{memories}"
            tier = MemoryTier(name, spec.capacity, f"{store}-{memories}")
        if spec.throttle is not None:
            how = spec.throttle
            tier = ThrottledTier(tier, how.bandwidth, how.latency, how.depth, how.write)
        tiers.append(tier)
    return tiers


def check_specs(specs: Sequence[str]) -> list[TierSpec]:
    """What tier texts say, before anything is made.

    Raises:
        ConfigError: a text is wrong, a folder is given twice, or memory tiers exceed the shared memory there is.
    """
    parsed = [parse_spec(text) for text in specs]
    paths = [spec.path.expanduser().resolve() for spec in parsed if spec.path is not None]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"folder {path} is given as a tier twice; keep one")
    _check_memory(sum(spec.capacity for spec in parsed if spec.kind == "memory"))
    return parsed


def _check_memory(total: int) -> None:
    # Each tier looks at what is free, which does not tell it of the others that are still empty.
    if not total or not SHARED_MEMORY.is_dir():
        return
    found = os.statvfs(SHARED_MEMORY)
    size = found.f_blocks * found.f_frsize
    if total > size:
        raise ConfigError(
            f"memory tiers of {format_size(total)} together exceed the {format_size(size)} of {SHARED_MEMORY}; "
            f"give less"
        )


def _capacity(text: str, size: str) -> int:
    try:
        capacity = parse_size(size)
    except ValueError as error:
        raise ConfigError(f"tier {text!r} has no size it can hold ({error}); {_HOW}") from None
    if capacity < _SMALLEST:
        raise ConfigError(f"tier {text!r} is smaller than {format_size(_SMALLEST)}; {_HOW}")
    return capacity


def _throttle(text: str, options: str) -> Throttle:
    rates: list[tuple[float, float]] = []
    latency, depth, write = 0.0, None, None
    try:
        for option in options.split(","):
            name, equals, value = option.partition("=")
            if not equals:
                rate, at, seconds = option.partition("@")
                rates.append((_rate(rate), parse_duration(seconds) if at else 0.0))
            elif name == "latency":
                latency = parse_duration(value)
            elif name == "depth":
                depth = int(value)
            elif name == "write":
                write = _rate(value)
            else:
                raise ValueError(f"unknown option {name!r}{nearest(name, ('latency', 'depth', 'write'))}")
        durations = [seconds for _, seconds in rates]
        if not rates or (0 in durations and len(rates) > 1) or (depth is not None and depth < 1):
            raise ValueError("one rate, or several each with its duration, and a depth of at least 1")
        throttle = Throttle(tuple(rates), latency, depth, write)
        _ = throttle.bandwidth
    except ValueError as error:
        raise ConfigError(
            f"tier {text!r} is not throttled by {options!r} ({error}); write throttled:600MB/s:memory:1GiB or "
            f"throttled:250MB/s@2s,80MB/s@1s:memory:1GiB"
        ) from None
    return throttle


def _rate(text: str) -> float:
    match = re.fullmatch(r"(.*)/s", text)
    if match is None:
        raise ValueError(f"{text!r} is no rate; a rate is a size per second such as 600MB/s")
    return float(parse_size(match[1]))
