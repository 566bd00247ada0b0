import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.core.config import StoreConfig
from headrace.core.errors import ConfigError
from headrace.store.layout import KVLayout
from headrace.store.opening import configured_tiers, open_store
from headrace.store.part import PartId, PartRange
from headrace.store.save import SaveSpec
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.faulty import Fault, FaultPlan, FaultyTier
from headrace.store.tiers.throttled import ThrottledTier
from headrace.store.tiers.tier import Tier

LAYOUT = KVLayout("a model", layers=4, kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=32)
WHOLE = PartRange(0, 4, 0, 2)
SHAPE = (4, 2, 2, 32, 16)  # layer, K and V, head, token, element
PART = LAYOUT.part_bytes(4, 2, 32)
ALL = StoreSettings(replication="all")


def tokens(seed: int, chunks: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, 32 * chunks).astype(np.int32)


def kv_of(key: bytes) -> np.ndarray:
    return np.random.default_rng(list(key)).random(SHAPE, dtype=np.float32)


def save(store: KVStore, key: bytes, chunk: int, weight: float = 1.0, kv: np.ndarray | None = None) -> bool:
    kv = kv_of(key) if kv is None else kv

    def pack(layer: int, record: memoryview) -> None:
        np.frombuffer(record, np.float32).reshape(SHAPE[1:])[:] = kv[layer]

    saving = store.save(SaveSpec(PartId(key, WHOLE), 32, chunk, weight), pack)
    for layer in reversed(range(4)) if saving else ():
        saving.layer_ready(layer)
    return saving is not None


def save_all(store: KVStore, keys: list[bytes]) -> None:
    for chunk, key in enumerate(keys):
        save(store, key, chunk)
    assert store.flush(30)


def load(store: KVStore, keys: list[bytes]) -> list[np.ndarray]:
    """What the store has of these chunks, from the first."""
    chunks = store.lookup(keys, WHOLE)
    arrived = [np.full(SHAPE, np.nan, np.float32) for _ in chunks]

    def deliver(chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
        arrived[chunk][first:last] = np.frombuffer(records, np.float32).reshape(-1, *SHAPE[1:])

    loading = store.load(chunks, WHOLE, deliver)
    loading.wait_all()
    return arrived


def assert_loads(store: KVStore, keys: list[bytes]) -> None:
    arrived = load(store, keys)
    assert len(arrived) == len(keys)
    for key, kv in zip(keys, arrived):
        np.testing.assert_array_equal(kv, kv_of(key))


def soon(true: Callable[[], bool]) -> None:
    """Another thread, or time, is about to make it true."""
    until, pause = time.monotonic() + 60, threading.Event()
    while not true():
        assert time.monotonic() < until
        pause.wait(0.01)


def two_tiers(folder: Path, capacity: int = 64 << 20) -> list[FaultyTier]:
    return [FaultyTier(DirTier(folder / name, capacity, name=name)) for name in ("a", "b")]


def test_a_prefix_comes_back_from_two_tiers_also_in_another_process_of_the_store(tmp_path: Path) -> None:
    store = KVStore(LAYOUT, two_tiers(tmp_path), ALL)
    keys = store.keys(tokens(1, 6))
    save_all(store, keys)
    assert_loads(store, keys)
    stats = store.stats()
    assert stats.saved_bytes == 6 * PART
    assert stats.written_bytes == 12 * PART
    assert stats.write_amplification == 2
    assert [tier.parts for tier in stats.tiers] == [6, 6]
    assert [tier.hits for tier in stats.tiers] == [6, 6]
    assert sum(tier.read_bytes for tier in stats.tiers) >= 6 * (PART - 4096)
    assert store.stats().queue_bytes == 0
    store.close()
    again = KVStore(LAYOUT, two_tiers(tmp_path), ALL)
    assert_loads(again, keys)
    assert not save(again, keys[0], 0)
    assert again.stats().saves_present == 1
    again.close()


def test_models_and_salts_share_nothing(tmp_path: Path) -> None:
    store = KVStore(LAYOUT, two_tiers(tmp_path))
    save_all(store, store.keys(tokens(1, 2), "one"))
    assert load(store, store.keys(tokens(1, 2), "two")) == []
    assert load(store, store.keys(tokens(1, 2))) == []
    store.close()


def test_one_tier_that_fails_costs_neither_the_other_nor_the_caller(tmp_path: Path) -> None:
    tiers = two_tiers(tmp_path)
    tiers[0].plan = FaultPlan(rates={Fault.WRITE_ERROR: 1.0})
    store = KVStore(LAYOUT, tiers, ALL)
    keys = store.keys(tokens(2, 8))
    save_all(store, keys)
    assert_loads(store, keys)
    first, second = store.stats().tiers
    assert first.degraded
    assert first.write_errors == 3  # then it is left alone
    assert first.skipped == 5
    assert first.used == first.parts == 0
    assert (second.writes, second.degraded) == (8, False)
    store.close()


def test_reads_fall_back_and_wrong_parts_are_dropped(tmp_path: Path) -> None:
    tiers = two_tiers(tmp_path)
    store = KVStore(LAYOUT, tiers, ALL)
    keys = store.keys(tokens(3, 6))
    save_all(store, keys)
    tiers[0].plan = FaultPlan(rates={Fault.FLIPPED_BIT: 1.0})
    assert_loads(store, keys)
    soon(lambda: 0 < store.stats().wrong_parts == store.stats().tiers[0].dropped)
    assert store.stats().tiers[0].parts == 6 - store.stats().wrong_parts
    store.close()


def test_a_full_disk_is_left_alone_and_service_goes_on_until_there_is_room(tmp_path: Path) -> None:
    tiers = two_tiers(tmp_path)[:1]
    tiers[0].plan = FaultPlan(calls={Fault.FULL: range(1, 3)})
    store = KVStore(LAYOUT, tiers)
    keys = store.keys(tokens(4, 6))
    save_all(store, keys[:3])
    assert store.stats().tiers[0].degraded
    assert not save(store, keys[3], 3)  # there is nowhere to go
    assert_loads(store, keys[:1])
    soon(lambda: save(store, keys[1], 1))  # after half a second it is tried again, and fails again
    assert store.flush(30)
    assert store.stats().tiers[0].degraded
    soon(lambda: save(store, keys[1], 1))
    save_all(store, keys[2:])
    assert_loads(store, keys)
    assert not store.stats().tiers[0].degraded
    assert store.stats().saves_failed in (2, 3)  # the third was not even begun, or skipped
    store.close()


def test_a_prefix_is_found_though_every_tier_has_another_piece_of_it(tmp_path: Path) -> None:
    store = KVStore(LAYOUT, two_tiers(tmp_path), ALL)
    keys = store.keys(tokens(5, 6))
    save_all(store, keys)
    for number, key in enumerate(keys):
        store._catalogs[number % 2].drop(PartId(key, WHOLE))
    assert [part.tiers for chunk in store.lookup(keys, WHOLE) for part in chunk.parts] == [(1,), (0,)] * 3
    assert_loads(store, keys)
    store.close()


def slow_tiers(folder: Path) -> list[FaultyTier]:
    """Two that are quick to write and slow to read, so that reading from both pays."""
    dirs = [DirTier(folder / name, 64 << 20, name=name) for name in ("a", "b")]
    return [FaultyTier(ThrottledTier(tier, 4e6, write_bandwidth=1e9)) for tier in dirs]


def test_reuse_copies_chunks_to_the_other_tier(tmp_path: Path) -> None:
    store = KVStore(LAYOUT, slow_tiers(tmp_path))
    keys = store.keys(tokens(6, 1))
    save_all(store, keys)
    assert sorted(tier.parts for tier in store.stats().tiers) == [0, 1]
    for _ in range(8):
        assert_loads(store, keys)
    assert store.flush(30)
    stats = store.stats()
    assert [tier.parts for tier in stats.tiers] == [1, 1]
    assert stats.copied_parts == 1
    assert stats.saved_bytes == PART
    assert_loads(store, keys)
    store.close()


def test_a_copy_is_verified_on_the_way(tmp_path: Path) -> None:
    tiers = slow_tiers(tmp_path)
    store = KVStore(LAYOUT, tiers)
    keys = store.keys(tokens(6, 1))
    save_all(store, keys)
    assert_loads(store, keys)
    source = next(i for i, tier in enumerate(store.stats().tiers) if tier.parts)
    tiers[source].plan = FaultPlan(rates={Fault.FLIPPED_BIT: 1.0})
    for _ in range(8):
        store.lookup(keys, WHOLE)
    assert store.flush(30)
    stats = store.stats()
    assert stats.copied_parts == 0
    assert stats.wrong_parts == 1
    assert [tier.parts for tier in stats.tiers] == [0, 0]
    store.close()


def test_a_stream_that_reuses_little_writes_no_more_than_one_tier_would(tmp_path: Path) -> None:
    written = {}
    for mode in ("auto", "one"):
        store = KVStore(LAYOUT, two_tiers(tmp_path / mode), StoreSettings(replication=mode))  # type: ignore[arg-type]
        for number in range(300):
            if number == 200:
                before = store.stats().written_bytes
            keys = store.keys(tokens(number if number % 25 else max(0, number - 100), 2))
            found = load(store, keys)
            for chunk in range(len(found), 2):
                save(store, keys[chunk], chunk)
            assert store.flush(30)
        stats = store.stats()
        written[mode] = stats.written_bytes - before
        assert stats.hit_chunks > 0
        assert stats.copied_parts == 0
        assert stats.write_amplification == 1
        store.close()
    assert 0 < written["auto"] <= written["one"]


def test_a_tier_keeps_to_its_capacity(tmp_path: Path) -> None:
    store = KVStore(LAYOUT, two_tiers(tmp_path, capacity=8 * PART)[:1])
    for seed in range(8):
        save_all(store, store.keys(tokens(seed, 4)))
    tier = store.stats().tiers[0]
    assert tier.parts == 8
    assert tier.used == 8 * PART
    assert tier.evicted == 24
    store.close()


def test_two_stores_on_one_folder_read_each_other_and_lease_in_turn(tmp_path: Path) -> None:
    one, two = KVStore(LAYOUT, two_tiers(tmp_path)), KVStore(LAYOUT, two_tiers(tmp_path))
    keys = one.keys(tokens(7, 4))
    assert one.lease(keys) == 4
    assert two.leased(keys) == [True] * 4
    assert two.lease(keys) == 0
    save_all(one, keys)
    one.release(keys)
    assert two.lease(keys) == 4
    assert_loads(two, keys)
    one.close()
    soon(lambda: len(two.lookup(keys, WHOLE)) == 4)  # it owns the tiers now
    assert_loads(two, keys)
    two.close()


def test_stores_need_tiers_of_different_names(tmp_path: Path) -> None:
    tier: Tier = DirTier(tmp_path, 1 << 20)
    with pytest.raises(ConfigError, match="different names"):
        KVStore(LAYOUT, [tier, tier])
    with pytest.raises(ConfigError, match="none"):
        KVStore(LAYOUT, [])


def test_the_configuration_opens_a_store_and_says_what_it_is(tmp_path: Path) -> None:
    opened = open_store(StoreConfig(tier=(f"dir:{tmp_path}:64MiB",)), LAYOUT)
    assert opened is not None
    assert opened.words == f"dir:{tmp_path} 64MiB"
    save_all(opened.store, opened.store.keys(tokens(1, 1)))
    files = list(tmp_path.rglob("*.kv"))
    assert len(files) == 1
    assert files[0].stat().st_mode & 0o777 == 0o600
    assert files[0].parent.stat().st_mode & 0o777 == 0o700
    opened.store.close()
    assert open_store(StoreConfig(store=False), LAYOUT) is None


def test_default_tiers_are_capped_and_lie_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    tiers = configured_tiers(())
    assert tiers[-1].name == f"dir:{tmp_path}/home/store"
    assert (tmp_path / "home" / "store").stat().st_mode & 0o777 == 0o700
    assert 64 << 20 <= tiers[-1].capacity <= 20 << 30
    for tier in tiers:
        if hasattr(tier, "remove_all"):
            assert 64 << 20 <= tier.capacity <= 1 << 30
            tier.remove_all()


def test_a_named_tier_that_cannot_be_had_is_an_error_a_default_one_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="file"):
        configured_tiers((f"dir:{blocked}/x:1GiB",))
    monkeypatch.setenv("HEADRACE_HOME", str(blocked))
    tiers = configured_tiers(())
    assert all(tier.name == "memory" for tier in tiers)
    assert "going on without a default tier" in caplog.text
    for tier in tiers:
        tier.remove_all()  # type: ignore[attr-defined]
