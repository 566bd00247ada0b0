"""Several engines over one tier folder, stepped by hand, with one clock that the test moves."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from engine_world import config, engine

from headrace.core.config import StoreConfig
from headrace.core.events import Delta
from headrace.core.request import Request
from headrace.engine.build import EngineParts
from headrace.engine.core import Engine
from headrace.perf.profile import DeviceProfile, cpu_name, path_of, save
from headrace.store.layout import KVLayout
from headrace.store.opening import OpenedStore
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.faulty import FaultPlan, FaultyTier
from headrace.store.tiers.spec import build_tiers
from homes import fresh_home

CHUNK = 16
#: The clock moves so far with a step: as far as a sequence waits between two looks.
TICK = 0.02
LEASE_SECONDS = 30.0
ALL = StoreSettings(replication="all", lease_seconds=LEASE_SECONDS)


def slow_home(folder: Path) -> Path:
    """A `HEADRACE_HOME` in which the device counts as one that takes milliseconds for a token of a tiny model.

    Whatever it really takes, so that no test depends on it.
    """
    fresh_home(folder)
    rates = {"kv_read": 1e12, "attention": 1e12, "copy": 1e12, "sum_read": 1e12, "step_overhead": 0.0}
    profile = DeviceProfile("cpu", cpu_name(), 1, 1, "float32", ((1, 8e6),), layer_overhead=0.0, **rates)
    save(profile, folder / "profiles" / path_of("cpu", 1, "float32").name)
    return folder


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Node:
    """One engine and its store."""

    engine: Engine
    parts: EngineParts
    store: KVStore
    deltas: dict[str, list[Delta]] = field(default_factory=dict)

    def add(self, *requests: Request) -> None:
        for item in requests:
            self.engine.add(item)

    @property
    def computed(self) -> int:
        return self.engine.stats().computed_tokens_total

    @property
    def leases(self) -> int:
        return self.store.stats().leases

    @property
    def lease_calls(self) -> int:
        return self.store.stats().lease_calls

    @property
    def waits(self) -> tuple[float, float]:
        """How many sequences waited, and how many of them in vain."""
        stats = self.engine.stats().store
        return stats["waits"], stats["waits_given_up"]

    def keys(self, text: list[int]) -> list[bytes]:
        return self.store.keys(np.array(text, np.int32))

    def tokens(self) -> dict[str, list[int]]:
        return {name: [token for delta in found for token in delta.tokens] for name, found in self.deltas.items()}


class Nodes:
    """Engines that share tiers.

    Args:
        model: that they run.
        folder: for their tiers.
        tiers: names of the tiers.
    """

    def __init__(self, model: Path, folder: Path, tiers: tuple[str, ...] = ("one", "other")) -> None:
        self.clock = Clock()
        self.nodes: list[Node] = []
        self._model = model
        self.specs = [f"dir:{folder / name}:64MiB" for name in tiers]
        self.folder = folder

    def store(self, layout: KVLayout, settings: StoreSettings = ALL, faults: FaultPlan | None = None) -> KVStore:
        """One more store on the tiers."""
        tiers = [FaultyTier(tier, faults) if faults else tier for tier in build_tiers(self.specs, self.folder)]
        return KVStore(layout, tiers, settings, self.clock)

    def start(self, settings: StoreSettings = ALL, faults: FaultPlan | None = None, **options: object) -> Node:
        """One more engine."""
        stores: list[KVStore] = []

        def opened(_: StoreConfig, layout: KVLayout) -> OpenedStore:
            stores.append(self.store(layout, settings, faults))
            return OpenedStore(stores[0], "of a test")

        limits = {"max_num_batched_tokens": 64, "kv_bytes": 8 << 20} | options
        made = config(self._model, store=StoreConfig(chunk_tokens=CHUNK), **limits)  # type: ignore[arg-type]
        running, parts = engine(made, opened=opened, clock=self.clock)
        node = Node(running, parts, stores[0])
        self.nodes.append(node)
        return node

    def step(self, *nodes: Node) -> None:
        """One step of each, and everything that it saved written.

        Time stands still while something loads, for how many steps that takes depends on the machine.
        """
        for node in nodes or self.nodes:
            for delta in node.engine.step():
                node.deltas.setdefault(delta.request, []).append(delta)
            node.engine.check()
            assert node.store.flush(60)
            if not any(one.parts.flow and one.parts.flow.loading for one in self.nodes):
                self.clock.now += TICK

    def run(self, *nodes: Node) -> None:
        """Until they are idle."""
        while any(not node.engine.idle for node in nodes or self.nodes):
            self.step(*nodes)

    def end(self) -> None:
        """Close all that run; nothing is held any more, and nobody has a lease."""
        layout = self.nodes[0].store.layout
        for node in self.nodes:
            node.engine.step()
            assert node.parts.group.allocator.used == 0
            assert node.leases == 0
        for node in self.nodes:
            assert node.engine.close(60)
        after = self.store(layout)
        assert after.stats().leases == 0
        after.close()
