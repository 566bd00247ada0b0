"""Where several workers of one machine run: CPU cores and an accelerator for each."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from headrace.core.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """What a worker process may use.

    Attributes:
        cpus: cores it runs on; empty: all of this process's.
        device: the accelerator, as `CUDA_VISIBLE_DEVICES` names it; None: all.
    """

    cpus: tuple[int, ...] = ()
    device: str | None = None


ANYWHERE = Place()


def split_machine(workers: int, cpus: Sequence[int] | None = None, devices: str | None = None) -> list[Place]:
    """Places for so many workers: neighbouring cores for each, and an accelerator each where there are any.

    Args:
        workers: how many.
        cpus: cores to share out; None: those of this process.
        devices: accelerators in the form of `CUDA_VISIBLE_DEVICES`; None: that variable, or 0, 1, .. if it is not set.

    Raises:
        ConfigError: there are fewer cores than workers, or the variable names fewer accelerators.
    """
    if workers == 1:
        return [ANYWHERE]
    cores = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
    if workers > len(cores):
        raise ConfigError(f"--dp {workers}: there are {len(cores)} cores; give at most as many workers")
    named = os.environ.get("CUDA_VISIBLE_DEVICES") if devices is None else devices
    names = [str(number) for number in range(workers)] if named is None else _visible(named)
    if 0 < len(names) < workers:
        raise ConfigError(f"--dp {workers}: CUDA_VISIBLE_DEVICES names {len(names)} accelerators ({named})")
    size, more = divmod(len(cores), workers)
    places, begin = [], 0
    for number in range(workers):
        end = begin + size + (number < more)
        places.append(Place(tuple(cores[begin:end]), names[number] if names else ""))
        begin = end
    return places


def _visible(named: str) -> list[str]:
    """The accelerators of a `CUDA_VISIBLE_DEVICES`; from a negative number on, CUDA hides them."""
    return [name for name in takewhile(lambda name: not name.startswith("-"), named.split(",")) if name]
