"""Stored records and pages: the same bits both ways, from any thread."""

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from paged_batch import PagedBatch, empty_planes

from headrace.kernels.attention import KV_DTYPES, AttentionBackend, Planes, backend_for


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def load(
    backend: AttentionBackend,
    planes: tuple[Planes, Planes],
    pages: NDArray[np.int64],
    first: int,
    tokens: int,
    record: bytearray,
) -> None:
    """One layer's record into its planes."""
    k, v = (x[None] for x in planes)
    backend.load_records(k, v, pages, first, tokens, memoryview(record), planes[0].shape[0])


@pytest.mark.parametrize("name", ["numba", "torch"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("page_size", "dim", "tokens"), [(16, 64, 64), (8, 24, 40), (16, 20, 61), (32, 128, 96)])
def test_a_record_is_k_then_v_in_canonical_order_and_comes_back(
    name: str, kv_dtype: str, page_size: int, dim: int, tokens: int
) -> None:
    backend = backend_for("cpu", name=name)
    paged = PagedBatch(backend, [(1, tokens)], dim=dim, page_size=page_size, kv_dtype=kv_dtype, kv_heads=3)
    count = -(-tokens // page_size)
    pages = paged.tables[0, :count].astype(np.int64)
    wanted = [x[:, :tokens] for x in backend.read_pages(*paged.planes, pages)]
    record = bytearray(len(bits(wanted[0])) * 2)
    backend.save_record(*paged.planes, pages, tokens, memoryview(record))
    assert bytes(record) == bits(wanted[0]) + bits(wanted[1])
    planes = empty_planes(backend, 3, 40, page_size, dim, kv_dtype)
    before = [bits(x) for x in backend.read_pages(*planes, np.arange(40))]
    fresh = np.random.default_rng(1).permutation(40)[:count].astype(np.int64)
    first = page_size if tokens > page_size else 0
    load(backend, planes, fresh, first, tokens, record)
    for found, want in zip(backend.read_pages(*planes, fresh), wanted, strict=True):
        assert bits(found[:, first:tokens]) == bits(want[:, first:])
        assert found[:, :first].isnan().all()
    assert [bits(x) for x in backend.read_pages(*planes, np.arange(40))] != before
    others = np.setdiff1d(np.arange(40), fresh)
    for found in backend.read_pages(*planes, others):
        assert found.isnan().all()  # nothing else was touched


@pytest.mark.parametrize("name", ["numba", "torch"])
def test_a_record_of_some_heads(name: str) -> None:
    backend = backend_for("cpu", name=name)
    paged = PagedBatch(backend, [(1, 48)], kv_heads=4)
    pages = paged.tables[0, :3].astype(np.int64)
    k, v = (planes[1:3] for planes in paged.planes)
    record = bytearray(2 * 2 * 48 * 32 * 4)
    backend.save_record(k, v, pages, 48, memoryview(record))
    wanted = [x[1:3] for x in backend.read_pages(*paged.planes, pages)]
    assert bytes(record) == bits(wanted[0]) + bits(wanted[1])


@pytest.mark.parametrize("name", ["numba", "torch"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [range(4), range(3), range(1, 3), range(3, 4)])
def test_records_of_several_layers_and_some_of_their_heads(name: str, kv_dtype: str, heads: range) -> None:
    backend = backend_for("cpu", name=name)
    layers, tokens, dim, size = 3, 40, 24, 16
    stored = np.random.default_rng(3).integers(1, 1 << 14, (layers, 2, 4, tokens, dim), np.uint16)
    payload = (stored.astype(np.uint32) << 16 if kv_dtype == "float32" else stored).reshape(layers, -1).view(np.uint8)
    records = np.pad(payload, ((0, 0), (0, 100)))
    made = [empty_planes(backend, 5, 8, size, dim, kv_dtype) for _ in range(layers)]
    if name == "numba":
        whole = [np.stack(x) for x in zip(*made, strict=True)]
        k, v = (x[:, 1 : 1 + len(heads)] for x in whole)
        made = [(whole[0][layer], whole[1][layer]) for layer in range(layers)]
    else:
        k, v = ([x[1 : 1 + len(heads)] for x in both] for both in zip(*made, strict=True))
    pages = np.array([6, 2, 3])
    backend.load_records(k, v, pages, 16, tokens, memoryview(records.reshape(-1)), 4, heads.start)
    for layer in range(layers):
        found = backend.read_pages(*made[layer], pages)
        for nth, new in enumerate(found):
            wanted = payload[layer].view(np.uint32 if kv_dtype == "float32" else np.uint16)
            wanted = wanted.reshape(2, 4, tokens, dim)[nth, heads.start : heads.stop, 16:]
            assert bits(new[1 : 1 + len(heads), 16:tokens]) == wanted.tobytes()
            assert new[:, :16].isnan().all()
            assert new[1 + len(heads) :].isnan().all()
            assert new[0].isnan().all()
    for first in (-1, 5 - len(heads)):
        with pytest.raises(ValueError, match="of records of 4 heads"):
            backend.load_records(k, v, pages, 0, tokens, memoryview(records.reshape(-1)), 4, first)


@pytest.mark.parametrize("name", ["numba", "torch"])
@pytest.mark.parametrize(("tokens", "count", "nbytes"), [(48, 3, 100), (48, 2, 1 << 20), (48, 0, 1 << 20)])
def test_what_is_too_short_is_refused(name: str, tokens: int, count: int, nbytes: int) -> None:
    backend = backend_for("cpu", name=name)
    planes: tuple[Planes, Planes] = empty_planes(backend, 2, 8, 16, 32, "float32")
    with pytest.raises(ValueError, match="tokens from token 0 need a record of"):
        backend.save_record(*planes, np.arange(count), tokens, memoryview(bytearray(nbytes)))
    with pytest.raises(ValueError, match="tokens from token 0 need a record of"):
        load(backend, planes, np.arange(count), 0, tokens, bytearray(nbytes))


def test_threads_load_beside_a_step() -> None:
    """Loads run beside attention on a team of two and disturb neither."""
    paged = PagedBatch(backend_for("cpu", threads=2), [(1, 500), (30, 90)])
    wanted = torch.cat(paged.attend())
    backend = paged.backend
    pages = paged.tables[0, :31].astype(np.int64)
    record = bytearray(2 * 2 * 496 * 32 * 4)
    backend.save_record(*paged.planes, pages, 496, memoryview(record))
    planes = empty_planes(backend, 2, 64, 16, 32, "float32")
    wrong: list[int] = []

    def work(number: int) -> None:
        own = np.arange(31, dtype=np.int64) + 32 * number
        copy = bytearray(len(record))
        for _ in range(100):
            load(backend, planes, own, 0, 496, record)
            backend.save_record(*planes, own, 496, memoryview(copy))
            if copy != record:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        assert torch.equal(torch.cat(paged.attend()), wanted)
    for thread in threads:
        thread.join()
    assert wrong == []
