"""A live KV group: planes over reserved memory, growing, shrinking, giving layers and heads away."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.kv_group import KVGroup, KVShape
from headrace.engine.pages import OutOfPages, PageAllocator
from headrace.engine.planes import HostPlanes
from headrace.engine.prefix_index import PageHasher, PrefixIndex
from headrace.engine.sequence import Sequence
from headrace.kernels.attention import AttentionBackend, backend_for

SHAPE = KVShape(range(2, 5), range(2), head_dim=8, page_size=8, dtype="float32")


@pytest.fixture(scope="module")
def backend() -> AttentionBackend:
    return backend_for("cpu", threads=1)


def sequence(name: str, prompt: list[int]) -> Sequence:
    return Sequence(Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=8)), 0, 64)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def content(group: KVGroup, backend: AttentionBackend, seq: Sequence) -> torch.Tensor:
    """K and V of a sequence's pages over all layers, in canonical order."""
    pages = np.array(seq.pages, np.int64)
    parts = [torch.cat(backend.read_pages(*group.planes(layer), pages), -1) for layer in group.shape.layers]
    return torch.stack(parts)


def fill(group: KVGroup, backend: AttentionBackend, seq: Sequence) -> None:
    pages = np.array(seq.pages, np.int64)
    for layer in group.shape.layers:
        k = torch.randn(len(group.shape.heads), len(pages) * group.shape.page_size, group.shape.head_dim)
        backend.write_pages(*group.planes(layer), pages, k, k + 1)


def test_sizes_are_counted_in_bytes() -> None:
    assert SHAPE.token_bytes == 2 * 3 * 2 * 8 * 4
    assert SHAPE.page_bytes == 8 * SHAPE.token_bytes
    assert SHAPE.pages_in(10 * SHAPE.page_bytes + 1) == 10


def test_padding_of_the_page_layout_counts(backend: AttentionBackend) -> None:
    shape = KVShape.stored_by(backend, range(1), range(1), head_dim=20, page_size=8, dtype="float32")
    stored = sum(a * b for a, b in (backend.k_page_shape(8, 20), backend.v_page_shape(8, 20)))
    assert shape.page_bytes == 4 * stored
    assert KVShape.stored_by(backend, range(1), range(1), 64, 16, "bfloat16").token_bytes == 2 * 64 * 2


def test_a_group_shrinks_under_live_sequences_and_grows_again(backend: AttentionBackend) -> None:
    group = KVGroup(SHAPE, 16, backend, reserve=32)
    low, high = sequence("low", [1]), sequence("high", [2])
    low.pages = group.allocator.allocate(3)
    middle = group.allocator.allocate(9)
    high.pages = group.allocator.allocate(4)
    group.allocator.release(middle)
    for seq in (low, high):
        fill(group, backend, seq)
    before = [content(group, backend, seq) for seq in (low, high)]
    group.resize(8, [low, high])
    assert group.pages == 8
    assert max(low.pages + high.pages) < 8
    for seq, kept in zip((low, high), before, strict=True):
        assert torch.equal(content(group, backend, seq), kept)
    group.allocator.check([low.pages, high.pages])
    with pytest.raises(OutOfPages, match="7 pages are in use"):
        group.resize(6, [low, high])
    group.resize(32, [low, high])
    more = group.allocator.allocate(25)
    assert sorted(low.pages + high.pages + more) == list(range(32))
    with pytest.raises(ConfigError, match="1 to 32 pages, not 33"):
        group.resize(33, [])


def test_shrinking_keeps_the_prefix_index_right(backend: AttentionBackend) -> None:
    group = KVGroup(SHAPE, 6, backend, reserve=6)
    hasher = PageHasher("f", 4)
    seq = sequence("s", list(range(20)))
    padding = group.allocator.allocate(3)
    seq.pages = group.allocator.allocate(3)
    keys = hasher.extend(seq, 3)
    for key, page in zip(keys, seq.pages, strict=True):
        group.index.insert(key, page, b"", seq.tokens)
    group.allocator.release(padding)
    fill(group, backend, seq)
    before = content(group, backend, seq)
    group.resize(3, [seq])
    assert group.index.match(keys, 3) == seq.pages
    assert torch.equal(content(group, backend, seq), before)


def test_released_memory_goes_back_to_the_system() -> None:
    planes = HostPlanes(2, 2, 4096, (16, 64), np.dtype(np.float32))
    before = resident_bytes()
    for layer in range(2):
        planes.layer(layer)[:] = 1.0
    full = resident_bytes() - before
    assert full > 0.9 * 2 * 2 * 4096 * 16 * 64 * 4
    planes.release_pages(2048, 4096)
    assert resident_bytes() - before < 0.6 * full
    assert planes.layer(1)[1, 2047].min() == 1.0
    assert planes.layer(1)[1, 2048].max() == 0.0
    planes.release_planes([0], range(2))
    assert resident_bytes() - before < 0.35 * full
    assert planes.layer(1)[0, 0].min() == 1.0


def test_a_layer_that_moved_away_is_gone_and_the_others_stay(backend: AttentionBackend) -> None:
    group = KVGroup(SHAPE, 4, backend, reserve=4)
    seq = sequence("s", [1])
    seq.pages = group.allocator.allocate(2)
    fill(group, backend, seq)
    pages = np.array(seq.pages, np.int64)
    kept = backend.read_pages(*group.planes(4), pages)
    group.release_layers(range(2, 4))
    with pytest.raises(KeyError):
        group.planes(2)
    assert torch.equal(backend.read_pages(*group.planes(4), pages)[0], kept[0])


def test_allocation_is_all_or_nothing_and_double_release_is_an_error() -> None:
    allocator = PageAllocator(4, PrefixIndex())
    pages = allocator.allocate(3)
    with pytest.raises(OutOfPages):
        allocator.allocate(2)
    assert allocator.available == 1
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        allocator.release(pages[:1])


def test_cached_pages_are_reused_oldest_leaf_first() -> None:
    index = PrefixIndex()
    allocator = PageAllocator(3, index)
    hasher = PageHasher("f", 4)
    seq = sequence("s", list(range(12)))
    keys = hasher.extend(seq, 3)
    pages = allocator.allocate(3)
    for key, page in zip(keys, pages, strict=True):
        index.insert(key, page, b"", seq.tokens)
    allocator.release(pages)
    assert index.match(keys, 3) == pages
    allocator.allocate(1)
    assert index.match(keys, 3) == pages[:2]  # the leaf went first


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["take", "drop", "share", "grow", "shrink"]), st.integers(1, 12)), max_size=40)
)
def test_pages_are_never_lost_or_doubled(moves: list[tuple[str, int]]) -> None:
    index = PrefixIndex()
    allocator = PageAllocator(12, index)
    held: list[list[int]] = []
    for number, (move, n) in enumerate(moves):
        if move == "take" and n <= allocator.available:
            held.append(allocator.allocate(n))
            index.insert(number.to_bytes(16, "little"), held[-1][0], b"", np.arange(4, dtype=np.int32))
        elif move == "share" and held:
            allocator.hold(held[0])
            held.append(list(held[0]))
        elif move == "drop" and held:
            allocator.release(held.pop(n % len(held)))
        elif move == "grow":
            allocator.grow(allocator.total + n)
        elif move == "shrink" and allocator.total > n and allocator.used <= allocator.total - n:
            target = dict(allocator.shrink(allocator.total - n))
            held = [[target.get(page, page) for page in pages] for pages in held]
        allocator.check(held)


def test_memory_of_the_first_pages_is_there_before_they_are_written(backend: AttentionBackend) -> None:
    group = KVGroup(SHAPE, 8192, backend)
    before = resident_bytes()
    group.commit(6144 * SHAPE.page_bytes)
    # The kernel may round a plane's part up to a huge page.
    assert 0.95 * 6144 * SHAPE.page_bytes < resident_bytes() - before < 6144 * SHAPE.page_bytes + 12 * (2 << 20)
    group.commit(100 * group.nbytes)  # more than the pool: all of it
    assert not any(plane.any() for layer in SHAPE.layers for plane in group.planes(layer))
