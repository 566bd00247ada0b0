"""Pages out, in and copied; new KV rounded to the stored type."""

import numpy as np
import pytest
import torch
from paged_batch import PagedBatch, empty_planes

from headrace.kernels.attention import KV_DTYPES, backend_for


@pytest.mark.parametrize("name", ["numba", "torch"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_written_rows_come_back_in_order(name: str, kv_dtype: str) -> None:
    """Rounded to the nearest value of the stored type, as torch rounds."""
    paged = PagedBatch(backend_for("cpu", name=name), [(50, 50)], dim=24, page_size=8, kv_dtype=kv_dtype)
    paged.k[0][0, 0, :4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, 1e-30])  # ties, a signed zero, underflow
    paged.write([(0, 50)])
    k, v = paged.backend.read_pages(*paged.planes, paged.tables[0, :7].astype(np.int64))
    assert k.shape == (2, 56, 24)
    for found, wanted in ((k, paged.k[0]), (v, paged.v[0])):
        assert found.dtype == getattr(torch, kv_dtype)
        assert torch.equal(found[:, :50], wanted.transpose(0, 1).to(found.dtype))
        assert found[:, 50:].isnan().all()


def test_rows_without_a_slot_are_not_stored_and_heads_may_be_strided() -> None:
    backend = backend_for("cpu")
    k_planes, v_planes = empty_planes(backend, 2, 4, 16, 8, "float32")
    slots = np.array([17, -1, 63], np.int64)
    step = backend.plan(
        np.array([0, 3], np.int32),
        np.array([3], np.int32),
        np.zeros((1, 1), np.int32),
        slots,
        num_heads=2,
        num_kv_heads=2,
    )
    k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    backend.write(step, k[0].transpose(0, 1), v[0].transpose(0, 1), k_planes, v_planes)
    got_k, got_v = backend.read_pages(k_planes, v_planes, np.arange(4))
    for found, new in ((got_k, k[0]), (got_v, v[0])):
        assert torch.equal(found[:, [17, 63]], new[:, [0, 2]])
        assert int(found.isfinite().sum()) == 2 * 2 * 8


@pytest.mark.parametrize("rows", [1, 40, 700])
def test_writes_on_two_threads_equal_one(rows: int) -> None:
    pages = []
    for threads in (1, 2):
        paged = PagedBatch(backend_for("cpu", threads=threads), [(rows, rows)], kv_heads=3, dim=64)
        pages.append(torch.cat(paged.backend.read_pages(*paged.planes, paged.tables[0, :1].astype(np.int64))))
    assert torch.equal(pages[0].nan_to_num(), pages[1].nan_to_num())


@pytest.mark.parametrize("name", ["numba", "torch"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pages_move_between_pools(name: str, kv_dtype: str) -> None:
    """Attention over exported, imported and copied pages gives the same bits."""
    paged = PagedBatch(backend_for("cpu", name=name), [(1, 70)], kv_dtype=kv_dtype)
    for planes in paged.planes:
        torch.nan_to_num_(planes) if isinstance(planes, torch.Tensor) else None
    (before,) = paged.attend()
    pages = paged.tables[0, :5].astype(np.int64)
    k, v = paged.backend.read_pages(*paged.planes, pages)
    paged.planes = empty_planes(paged.backend, paged.kv_heads, 12, paged.page_size, paged.dim, kv_dtype)
    for planes in paged.planes:
        torch.nan_to_num_(planes) if isinstance(planes, torch.Tensor) else None
    paged.backend.write_pages(*paged.planes, np.array([11, 3, 5, 7, 9]), k[:, :70], v[:, :70])
    paged.backend.copy_pages(*paged.planes, np.array([11, 7]), np.array([0, 1]))
    paged.tables[0, :5] = [0, 3, 5, 1, 9]
    assert torch.equal(paged.attend()[0], before)
