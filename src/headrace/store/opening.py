"""From the configuration to an open store, and the words to say about it."""

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.core.config import StoreConfig
from headrace.core.errors import ConfigError
from headrace.core.paths import home
from headrace.core.settings import format_size
from headrace.store.layout import KVLayout
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.memory import SHARED_MEMORY
from headrace.store.tiers.spec import build_tiers
from headrace.store.tiers.tier import Tier, TierError

log = logging.getLogger(__name__)

#: Where nothing is said: a share of what is free, up to so many bytes, and nothing below the least that is of use.
SHARE = 0.1
MOST_MEMORY, MOST_DISK = 1 << 30, 20 << 30
LEAST = 64 << 20


@dataclass(frozen=True)
class OpenedStore:
    """A store, and what to say about it at start.

    Attributes:
        store: ready for use; whoever opened it closes it.
        words: its tiers, e.g. `memory 1GiB, dir:/x 20GiB`.
    """

    store: KVStore
    words: str


def open_store(config: StoreConfig, layout: KVLayout) -> OpenedStore | None:
    """The store that a configuration asks for; None when it is off, or when no default tier can be had.

    Raises:
        ConfigError: a tier that was named cannot be used.
    """
    if not config.store:
        return None
    tiers = configured_tiers(config.tier)
    if not tiers:
        return None
    try:
        store = KVStore(layout, tiers, StoreSettings.of(config))
    except TierError as error:
        raise ConfigError(f"a tier cannot be used: {error}; give another --tier, or --no-store") from error
    return OpenedStore(store, ", ".join(f"{tier.name} {show_size(tier.capacity)}" for tier in tiers))


def configured_tiers(specs: Sequence[str]) -> list[Tier]:
    """The tiers named, or the default ones: each of those that cannot be had is a warning, and left out.

    Raises:
        ConfigError: a tier that was named cannot be used.
    """
    if specs:
        return build_tiers(specs, home())
    tiers: list[Tier] = []
    for make in (default_memory, default_dir):
        try:
            spec = make()
            tiers += build_tiers([spec], home()) if spec else []
        except (ConfigError, OSError) as error:
            log.warning("going on without a default tier of the KV store", extra={"reason": str(error)})
    return tiers


def default_memory() -> str | None:
    """The memory tier where none is named: up to 1 GiB, a tenth of free memory, and half of what /dev/shm has free.

    As with the `dir` tier, what lies there already counts as free.
    """
    if not SHARED_MEMORY.is_dir():
        return None
    held = folder_bytes(SHARED_MEMORY / f"headrace-{os.geteuid()}")
    shared = (shutil.disk_usage(SHARED_MEMORY).free + held) // 2
    room = min(MOST_MEMORY, int(SHARE * psutil.virtual_memory().available), shared)
    return f"memory:{room >> 20}MiB" if room >= LEAST else None


def default_dir() -> str | None:
    """The `dir` tier where none is named: `HEADRACE_HOME/store`, up to 20 GiB and a tenth of the disk's free room.

    What the tier holds already counts as free, so that it does not shrink from start to start.

    Raises:
        OSError: the folder cannot be made.
    """
    folder = home() / "store"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free + folder_bytes(folder)
    room = min(MOST_DISK, int(SHARE * free))
    return f"dir:{folder}:{room >> 20}MiB" if room >= LEAST else None


def folder_bytes(folder: Path) -> int:
    """Bytes that all files below a folder take; what goes away meanwhile does not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total


def show_size(nbytes: int) -> str:
    """Bytes for people: exact where that is short."""
    exact = format_size(nbytes)
    return exact if len(exact) <= 8 else f"{nbytes / 2**30:.1f}GiB"
