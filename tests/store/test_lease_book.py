"""Leases of a store: who is told what, in how few calls, and that none is left behind."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.store.catalog.local import LocalCatalog
from headrace.store.layout import KVLayout
from headrace.store.lease_book import TOGETHER, LeaseBook
from headrace.store.part import PartId, PartRange
from headrace.store.save import SaveSpec
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.faulty import Fault, FaultPlan, FaultyTier
from headrace.store.tiers.tier import Tier

KEYS = [bytes([number]) * 32 for number in range(200)]
LAYOUT = KVLayout("a model", layers=2, kv_heads=1, head_dim=16, dtype="float32", chunk_tokens=32)
WHOLE = PartRange(0, 2, 0, 1)


class World:
    """Two stores' books of one catalog, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.catalog = LocalCatalog(DirTier(folder, 1 << 20), clock=lambda: self.now)
        self.released: list[Sequence[bytes]] = []
        release = self.catalog.release

        def noted(keys: Sequence[bytes], holder: str) -> None:
            self.released.append(list(keys))
            release(keys, holder)

        self.catalog.release = noted  # type: ignore[method-assign]
        self.one, self.two = (LeaseBook(self.catalog, name, 10.0, lambda: self.now) for name in ("one", "two"))

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these are anybody's."""
        return self.catalog.leased(keys, "a third")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_what_is_not_stored_is_given_back_at_once_and_what_is_together(world: World) -> None:
    assert world.one.take(KEYS[:4]) == 4
    assert world.two.take(KEYS[:6]) == 0
    for key in KEYS[:4]:
        world.one.saving(key)
    world.one.over(KEYS[1], stored=False)
    assert world.held(KEYS[:4]) == [True, False, True, True]
    world.one.over(KEYS[0], stored=True)
    world.one.over(KEYS[2], stored=True)
    assert world.released == [[KEYS[1]]]
    world.one.over(KEYS[3], stored=True)
    assert world.held(KEYS[:4]) == [False] * 4
    assert [len(keys) for keys in world.released] == [1, 3]
    assert world.one.held == 0
    assert world.one.calls == 3


def test_leases_on_stored_chunks_do_not_pile_up_while_others_are_held(world: World) -> None:
    assert world.one.take(KEYS[:150]) == 150
    for key in KEYS[:149]:
        world.one.saving(key)
        world.one.over(key, stored=True)
    assert sum(world.held(KEYS[:150])) == 150 - 2 * TOGETHER
    assert len(world.released) == 2


def test_one_whose_save_has_begun_ends_with_that_and_not_before(world: World) -> None:
    assert world.one.take(KEYS[:3]) == 3
    world.one.saving(KEYS[0])
    world.one.give_up(KEYS[:3])
    assert world.held(KEYS[:3]) == [True, False, False]
    assert world.one.held == 1
    world.one.over(KEYS[0], stored=False)
    assert world.held(KEYS[:1]) == [False]
    world.one.over(KEYS[0], stored=False)
    world.one.give_up(KEYS[:3])
    assert len(world.released) == 2, "nothing to say any more"


def test_two_sequences_of_a_store_with_one_chunk_both_have_to_give_it_up(world: World) -> None:
    assert world.one.take(KEYS[:2]) == 2
    assert world.one.take(KEYS[:3]) == 3
    world.one.give_up(KEYS[:2])
    assert world.held(KEYS[:3]) == [True] * 3
    world.one.give_up(KEYS[:3])
    assert world.held(KEYS[:3]) == [False] * 3
    assert world.one.held == 0


def test_a_stored_chunk_that_is_leased_anew_stays_leased(world: World) -> None:
    assert world.one.take(KEYS[:2]) == 2
    world.one.saving(KEYS[0])
    world.one.over(KEYS[0], stored=True)
    assert world.one.take(KEYS[:1]) == 1  # it was evicted
    world.one.give_up(KEYS[1:2])
    assert world.held(KEYS[:2]) == [True, False]


def test_renewing_at_half_time_keeps_what_is_ours_and_forgets_what_is_not(world: World) -> None:
    assert world.one.take(KEYS[:4]) == 4
    world.one.saving(KEYS[1])
    calls = world.one.calls
    world.now = 4.9
    world.one.renew()
    assert world.one.calls == calls, "too early"
    world.now = 5.0
    world.one.renew()
    world.one.renew()
    assert world.one.calls == calls + 1
    world.now = 14.9
    assert world.held(KEYS[:4]) == [True] * 4
    world.now = 15.1
    assert world.held(KEYS[:4]) == [False] * 4
    assert world.two.take(KEYS[2:3]) == 1
    world.one.renew()
    assert world.one.held == 3
    assert world.two.leased(KEYS[:4]) == [True, True, False, True]
    world.one.close()
    assert world.held(KEYS[:4]) == [False, False, True, False]
    world.two.close()
    assert len(world.catalog._leases) == 0


def test_new_leases_are_not_renewed_before_their_half_time(world: World) -> None:
    assert world.one.take(KEYS[:1]) == 1
    world.one.give_up(KEYS[:1])
    world.now = 100.0
    assert world.one.take(KEYS[:1]) == 1
    calls = world.one.calls
    world.one.renew()
    assert world.one.calls == calls


class Stores:
    """A store on one folder, and another that looks on."""

    def __init__(self, folder: Path, faults: FaultPlan | None = None, **settings: object) -> None:
        tiers: list[Tier] = [DirTier(folder / name, 1 << 20, name=name) for name in ("a", "b")]
        self.store = KVStore(
            LAYOUT,
            [FaultyTier(tier, faults) if faults else tier for tier in tiers],
            StoreSettings(**({"replication": "all"} | settings)),  # type: ignore[arg-type]
        )
        self.other = KVStore(LAYOUT, [DirTier(folder / name, 1 << 20, name=name) for name in ("a", "b")])
        self.keys = self.store.keys(np.arange(4 * 32, dtype=np.int32))

    def save(self, number: int) -> bool:
        spec = SaveSpec(PartId(self.keys[number], WHOLE), 32, number, 1.0)
        saving = self.store.save(spec, lambda layer, record: None)
        for layer in range(2) if saving else ():
            saving.layer_ready(layer)
        return saving is not None

    def close(self) -> None:
        self.store.close()
        self.other.close()


def test_a_save_ends_the_lease_once_the_chunk_can_be_found(tmp_path: Path) -> None:
    stores = Stores(tmp_path, idle_seconds=1e9)  # nothing is written before `flush`
    assert stores.store.lease(stores.keys) == 4
    stores.store.forward(True)
    stores.store.forward(False)
    assert all(stores.save(number) for number in range(3))
    stores.store.release(stores.keys)
    assert stores.other.leased(stores.keys) == [True, True, True, False]
    assert stores.other.lookup(stores.keys, WHOLE) == []
    assert stores.store.flush(30)
    assert len(stores.other.lookup(stores.keys, WHOLE)) == 3
    assert stores.other.leased(stores.keys) == [False] * 4
    assert stores.store.stats().leases == 0
    assert stores.store.lease(stores.keys[2:]) == 2
    assert not stores.save(2), "it is there"
    assert stores.store.stats().leases == 1
    stores.store.release(stores.keys[3:])
    assert stores.other.leased(stores.keys) == [False] * 4
    stores.close()


def test_a_save_that_is_cancelled_or_fails_or_is_refused_ends_it_too(tmp_path: Path) -> None:
    stores = Stores(tmp_path, FaultPlan(seed=1, rates={Fault.WRITE_ERROR: 1.0}), write_queue=1)
    assert stores.store.lease(stores.keys) == 4
    saving = stores.store.save(SaveSpec(PartId(stores.keys[0], WHOLE), 32, 0, 1.0), lambda layer, record: None)
    assert saving is not None
    assert not stores.save(1), "the queue is full"
    assert stores.other.leased(stores.keys) == [True, False, True, True]
    saving.cancel()
    assert stores.other.leased(stores.keys) == [False, False, True, True]
    assert stores.save(2)
    assert stores.store.flush(30)
    assert stores.other.leased(stores.keys) == [False, False, False, True]
    stores.store.close()
    assert stores.other.leased(stores.keys) == [False] * 4, "closing gives back the rest"
    stores.other.close()


def test_what_the_policy_does_not_save_is_not_leased_any_more(tmp_path: Path) -> None:
    stores = Stores(tmp_path, replication="none")
    assert stores.store.would_save(stores.keys, 0, 1.0, WHOLE) == 0
    assert stores.store.lease(stores.keys) == 4
    assert not stores.save(0)
    assert stores.other.leased(stores.keys) == [False, True, True, True]
    stores.close()
