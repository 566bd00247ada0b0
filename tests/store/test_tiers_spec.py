import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts_world import content, load, part_id, store

from headrace.core.errors import ConfigError
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.memory import MemoryTier
from headrace.store.tiers.spec import Throttle, TierSpec, build_tiers, parse_spec, show_spec
from headrace.store.tiers.throttled import ThrottledTier

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("memory:4GiB", TierSpec("memory", 4 * GIB)),
        ("memory:1.5GB", TierSpec("memory", 1_500_000_000)),
        ("dir:/mnt/nvme:100GiB", TierSpec("dir", 100 * GIB, Path("/mnt/nvme"))),
        ("dir:/mnt/nvme:100GiB:node", TierSpec("dir", 100 * GIB, Path("/mnt/nvme"))),
        ("dir:/mnt/a:b:c:2TiB:cluster", TierSpec("dir", 2048 * GIB, Path("/mnt/a:b:c"), "cluster")),
        ("dir:~/kv:1GiB", TierSpec("dir", GIB, Path("~/kv"))),
        ("throttled:600MB/s:memory:1GiB", TierSpec("memory", GIB, throttle=Throttle(((600e6, 0.0),)))),
        (
            "throttled:250MB/s@2s,80MB/s@1s,latency=1ms,depth=3,write=100MB/s:dir:/a:b:1GiB:cluster",
            TierSpec("dir", GIB, Path("/a:b"), "cluster", Throttle(((250e6, 2.0), (80e6, 1.0)), 0.001, 3, 100e6)),
        ),
    ],
)
def test_texts_and_what_they_mean(text: str, spec: TierSpec) -> None:
    assert parse_spec(text) == spec
    assert parse_spec(show_spec(spec)) == spec


sizes = st.integers(1 << 20, 1 << 50)
throttles = st.one_of(
    st.none(),
    st.builds(
        lambda rates, latency, depth, write: Throttle(tuple(rates), latency, depth, write),
        st.one_of(
            st.tuples(st.tuples(st.integers(1, 10**12).map(float), st.just(0.0))),
            st.lists(st.tuples(st.integers(1, 10**12).map(float), st.sampled_from([0.5, 1.0, 90.0])), min_size=1),
        ),
        st.sampled_from([0.0, 0.001, 2.0]),
        st.one_of(st.none(), st.integers(1, 64)),
        st.one_of(st.none(), st.integers(1, 10**12).map(float)),
    ),
)
paths = st.text("abc:/@ ,=.", min_size=1).map(lambda text: Path("/" + text))


@given(
    st.one_of(
        st.builds(TierSpec, st.just("memory"), sizes, throttle=throttles),
        st.builds(TierSpec, st.just("dir"), sizes, paths, st.sampled_from(["node", "cluster"]), throttles),
    )
)
def test_what_is_shown_is_read(spec: TierSpec) -> None:
    assert parse_spec(show_spec(spec)) == spec


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("", "memory:4GiB"),
        ("memori:4GiB", "did you mean memory"),
        ("s3:bucket:1GiB", "unknown tier"),
        ("memory", "no size"),
        ("memory:lots", "no size"),
        ("memory:4", "smaller than 1MiB"),
        ("memory:4GiB:cluster", "no size"),
        ("dir:/mnt/nvme", "lacks a path or a size"),
        ("dir:/mnt/nvme:cluster", "lacks a path or a size"),
        ("dir::4GiB", "lacks a path or a size"),
        ("dir:/mnt/nvme:4XiB", "unknown unit"),
        ("throttled:600MB/s", "unknown tier"),
        ("throttled:600MB:memory:1GiB", "size per second"),
        ("throttled:0MB/s:memory:1GiB", "must not be negative, nor all"),
        ("throttled:1MB/s,2MB/s:memory:1GiB", "each with its duration"),
        ("throttled:1MB/s@2s,2MB/s:memory:1GiB", "each with its duration"),
        ("throttled:latency=1ms:memory:1GiB", "one rate"),
        ("throttled:1MB/s,latence=1ms:memory:1GiB", "did you mean latency"),
        ("throttled:1MB/s,depth=0:memory:1GiB", "depth of at least 1"),
        ("throttled:1MB/s:throttled:1MB/s:memory:1GiB", "twice"),
    ],
)
def test_what_is_wrong_and_the_way_out(text: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out) as caught:
        parse_spec(text)
    assert "\n" not in str(caught.value)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    before = {path.name for path in Path(f"/dev/shm/headrace-{os.geteuid()}").glob("*")}
    yield tmp_path / "home"
    for path in Path(f"/dev/shm/headrace-{os.geteuid()}").glob("*"):
        assert path.name in before, "a test left shared memory behind"


def test_tiers_are_built_in_order_under_unique_names(tmp_path: Path, home: Path) -> None:
    specs = ["memory:1MiB", f"dir:{tmp_path / 'a'}:1GiB:cluster", "throttled:1GB/s,depth=9:memory:2MiB"]
    tiers = build_tiers(specs, home)
    again = build_tiers(specs, home)
    elsewhere = build_tiers(specs[:1], tmp_path / "other home")
    first, second, third = tiers
    assert [tier.name for tier in tiers] == ["memory", f"dir:{tmp_path / 'a'}", "memory-2"]
    assert [tier.capacity for tier in tiers] == [1 << 20, GIB, 2 << 20]
    assert [tier.scope for tier in tiers] == ["node", "cluster", "node"]
    assert isinstance(second, DirTier)
    assert isinstance(third, ThrottledTier)
    assert third.depth == 9
    part = part_id(1)
    for tier, same in zip(tiers, again, strict=True):
        store(tier, part)
        assert load(same, part) == content(part)
        tier.delete(part)
    store(first, part)
    assert list(third.scan()) == []
    assert list(elsewhere[0].scan()) == []
    for tier in (first, third.inner, elsewhere[0]):
        assert isinstance(tier, MemoryTier)
        tier.remove_all()


def test_a_folder_is_given_once_only(tmp_path: Path, home: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="twice"):
        build_tiers([f"dir:{tmp_path / 'a'}:1GiB", f"dir:{tmp_path / 'link'}:2GiB"], home)
    assert not (tmp_path / "a").exists()


def test_memory_tiers_must_fit_together(home: Path) -> None:
    room = os.statvfs("/dev/shm")
    each = room.f_blocks * room.f_frsize // 2 + 4096
    with pytest.raises(ConfigError, match="together exceed"):
        build_tiers([f"memory:{each}", f"memory:{each}"], home)


def test_a_default_store_needs_nothing_but_a_home(home: Path) -> None:
    (tier,) = build_tiers([f"dir:{home / 'kv'}:1GiB"], home)
    store(tier, part_id(1))
    shutil.rmtree(home)
    assert not home.exists()
