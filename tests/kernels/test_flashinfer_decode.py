"""What is handed to FlashInfer, by a stand-in that computes what its documentation says; FlashInfer needs a GPU."""

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.kernels.attention import backend_for
from headrace.kernels.flashinfer_decode import FlashInferDecode
from headrace.kernels.static_attention import GatherDecode, static_decode
from headrace.kernels.torch_attention import TorchAttention

PAGE, KV_HEADS, GROUP, DIM, PAGES = 8, 2, 3, 64, 20
HEADS = KV_HEADS * GROUP


class Wrapper:
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph`: plans copy into the buffers, runs read only them."""

    made = 0

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: torch.Tensor,
        paged_kv_indices_buffer: torch.Tensor,
        paged_kv_last_page_len_buffer: torch.Tensor,
    ) -> None:
        assert (kv_layout, use_cuda_graph) == ("HND", True)
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last = paged_kv_last_page_len_buffer
        Wrapper.made += 1

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}
        assert len(last_page_len) == len(self.last)
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (HEADS, KV_HEADS, DIM, PAGE)
        self.indptr.copy_(indptr)
        self.indices[: len(indices)].copy_(indices)
        self.last.copy_(last_page_len)
        self.options = options

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert q.is_contiguous()
        window, cap = self.options["window_left"], self.options["logits_soft_cap"]
        out = torch.empty_like(q)
        for row in range(len(q)):
            pages = self.indices[int(self.indptr[row]) : int(self.indptr[row + 1])].long()
            length = (len(pages) - 1) * PAGE + int(self.last[row])
            k, v = (cache[pages].transpose(0, 1).flatten(1, 2)[:, :length] for cache in paged_kv_cache)
            scores = torch.einsum("kgd,kld->kgl", q[row].view(KV_HEADS, GROUP, DIM), k) * self.options["sm_scale"]
            if cap:
                scores = cap * torch.tanh(scores / cap)
            if window >= 0:  # FlashInfer's bound is inclusive and counts what lies left of the query's own position
                scores[..., : max(0, length - 1 - window)] = -torch.inf
            out[row] = torch.einsum("kgl,kld->kgd", scores.softmax(-1), v).flatten(0, 1)
        return out


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def test_it_attends_as_the_gathering_one_over_several_steps() -> None:
    torch.manual_seed(0)
    device = torch.device("cpu")
    planes = [torch.randn(KV_HEADS, PAGES + 1, PAGE, DIM) for _ in range(2)]
    for plane in planes:
        plane[:, PAGES] = 0
    tables = np.random.default_rng(0).permutation(PAGES).astype(np.int32).reshape(4, 5)
    gather, flash = (kind(6, 5, PAGE, PAGES, device) for kind in (GatherDecode, FlashInferDecode))
    Wrapper.made = 0
    settings = [(0.1, None, None), (0.1, 12, None), (0.2, None, 5.0)]
    for lengths in ([1, 8, 9, 40], [2, 9, 16], [40, 39, 38, 37]):
        kv_lens, n = np.array(lengths, np.int32), len(lengths)
        at = kv_lens - 1
        slots = tables[np.arange(n), at // PAGE].astype(np.int64) * PAGE + at % PAGE
        new = [torch.randn(6, KV_HEADS, DIM) for _ in range(2)]
        q = torch.randn(6, DIM, HEADS).transpose(1, 2)  # strided, as after a rotation
        found = []
        for attention in (gather, flash):
            attention.load(kv_lens, tables[:n, : int(-(-max(lengths) // PAGE))], slots)
            attention.begin()
            attention.write(*new, *planes)
            found.append([attention.attend(q, *planes, scale=s, window=w, softcap=c)[:n] for s, w, c in settings])
        for ours, theirs in zip(*found, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
        for plane, values in zip(planes, new):
            assert torch.equal(plane.flatten(1, 2)[:, slots], values[:n].transpose(0, 1))
    assert Wrapper.made == len(settings)  # planned again for each step, made once


def test_which_one_reads_a_backend_s_planes() -> None:
    assert static_decode(TorchAttention("cpu"), "bfloat16", "bfloat16", 128) is GatherDecode
    flash = TorchAttention("cpu")
    flash.name = "flashinfer"
    assert static_decode(flash, "bfloat16", "bfloat16", 128) is FlashInferDecode
    for dtype, kv_dtype, dim in (
        ("float32", "float32", 128),
        ("bfloat16", "float32", 128),
        ("bfloat16", "bfloat16", 80),
    ):
        assert static_decode(flash, dtype, kv_dtype, dim) is GatherDecode
    with pytest.raises(ConfigError, match="'numba' has no fixed-buffer decode"):
        static_decode(backend_for("cpu", threads=1), "float32", "float32", 64)


def test_buckets_of_pages() -> None:
    assert [GatherDecode.page_bucket(pages, 100) for pages in (1, 8, 9, 16, 64, 65, 100)] == [
        8,
        8,
        16,
        16,
        64,
        100,
        100,
    ]
    assert GatherDecode.page_bucket(3, 4) == 4
    assert FlashInferDecode.page_bucket(3, 100) == 100
