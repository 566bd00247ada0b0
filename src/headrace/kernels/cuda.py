"""Paged attention on CUDA: FlashInfer where it is installed, else plain torch. Not run on a GPU yet.

FlashInfer reads the planes as they are, `[kv_heads, pages, page_size, head_dim]`, through a transposed view in its
`HND` layout (it takes the strides of pages and heads from the tensors). Writing, reading and copying pages are torch's.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.errors import ConfigError
from headrace.kernels.attention import AttentionBackend, Planes
from headrace.kernels.torch_attention import TorchAttention, TorchStep

WORKSPACE_BYTES = 128 << 20
"""Bytes of device memory that FlashInfer asks for per wrapper."""

_HEAD_DIMS = (64, 128, 256)


def flashinfer_runs(q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashInfer has kernels for queries and KV of these types and heads of this size."""
    return q_dtype == kv_dtype and q_dtype in (torch.float16, torch.bfloat16) and head_dim in _HEAD_DIMS


def cuda_backend(device: str, *, require_flashinfer: bool = False) -> AttentionBackend:
    """FlashInfer's attention, or torch's where FlashInfer is not installed.

    Raises:
        ConfigError: FlashInfer is required and missing.
    """
    if importlib.util.find_spec("flashinfer"):
        return FlashInferAttention(device)
    if require_flashinfer:
        raise ConfigError("attention kernel 'flashinfer' is not installed; pip install 'headrace[cuda]'")
    return TorchAttention(device)


@dataclass(frozen=True, slots=True)
class FlashInferStep(TorchStep):
    """A step's arrays on the host, from which FlashInfer plans."""

    cu_q: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]


class FlashInferAttention(TorchAttention):
    """Decode rows and prefill chunks in one `BatchPrefillWithPagedKVCacheWrapper` call per layer.

    One wrapper is kept per setting (scale, window, soft-cap, head counts), since FlashInfer plans each apart; it is
    planned again when another step uses it. What FlashInfer has no kernels for (float32, unusual head sizes) goes the
    way of plain torch.
    """

    name = "flashinfer"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._wrapper_type = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._wrappers: dict[Any, Any] = {}
        self._planned: dict[Any, FlashInferStep] = {}

    def plan(
        self,
        cu_q: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int64],
        *,
        num_heads: int,
        num_kv_heads: int,
    ) -> FlashInferStep:
        """See `AttentionBackend.plan`."""
        base = super().plan(cu_q, kv_lens, block_tables, slots, num_heads=num_heads, num_kv_heads=num_kv_heads)
        return FlashInferStep(
            base.rows,
            base.spans,
            base.tables,
            base.stored,
            base.slots,
            cu_q.copy(),
            kv_lens.copy(),
            block_tables.copy(),
        )

    def attend(
        self,
        step: TorchStep,
        q: torch.Tensor,
        k_planes: Planes,
        v_planes: Planes,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(k_planes, torch.Tensor)
        assert isinstance(v_planes, torch.Tensor)
        if not (flashinfer_runs(q.dtype, k_planes.dtype, q.shape[2]) and isinstance(step, FlashInferStep)):
            return super().attend(step, q, k_planes, v_planes, scale=scale, window=window, softcap=softcap)
        kv_heads, pages, page_size, dim = k_planes.shape
        setting = (scale, window, softcap, q.shape[1], kv_heads, page_size, dim, q.dtype, k_planes.dtype)
        wrapper = self._wrappers.get(setting)
        if wrapper is None:
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            wrapper = self._wrappers[setting] = self._wrapper_type(workspace, "HND")
        if self._planned.get(setting) is not step:
            indptr, indices, last = page_lists(step.kv_lens, step.block_tables, page_size, pages)
            wrapper.plan(
                *(torch.from_numpy(array).to(self.device) for array in (step.cu_q, indptr, indices, last)),
                q.shape[1],
                kv_heads,
                dim,
                page_size,
                causal=True,
                sm_scale=scale,
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=softcap or None,
                q_data_type=q.dtype,
                kv_data_type=k_planes.dtype,
            )
            self._planned[setting] = step
        out: torch.Tensor = wrapper.run(q.contiguous(), (k_planes.transpose(0, 1), v_planes.transpose(0, 1)))
        return out


def page_lists(
    kv_lens: npt.NDArray[np.int32], block_tables: npt.NDArray[np.int32], page_size: int, pages: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Block tables as one list of pages: its bounds per sequence `[n + 1]`, the pages, tokens in each last page `[n]`.

    Entries that may hold anything (before a window) become some page that exists.
    """
    counts = -(-kv_lens.astype(np.int64) // page_size)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    used = np.arange(block_tables.shape[1])[None, :] < counts[:, None]
    indices = np.clip(block_tables[used], 0, pages - 1).astype(np.int32)
    last = (kv_lens - (counts - 1) * page_size).astype(np.int32)
    return indptr, indices, last
