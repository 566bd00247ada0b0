"""Decode attention by FlashInfer over fixed buffers, for CUDA graphs. After FlashInfer 0.6.18; not run on a GPU yet."""

import functools
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.cuda import WORKSPACE_BYTES, page_lists
from headrace.kernels.static_attention import GatherDecode


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Scratch of the kernels, shared by all wrappers: steps run one after the other on one stream."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class FlashInferDecode(GatherDecode):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph`, one per setting (scale, window, soft-cap).

    The grid of its kernels depends on the number of rows alone, so one capture serves contexts of any length; `load`
    plans on the host before each replay. A wrapper is made when a layer first attends, which must be in a run before
    the capture. Through tensor cores, which take any number of query heads per kv head.
    """

    def __init__(self, rows: int, pages: int, page_size: int, scratch_page: int, device: torch.device) -> None:
        super().__init__(rows, 0, page_size, scratch_page, device)
        self._most_pages, self._at = pages, device
        self._wrappers: dict[Any, Any] = {}
        self._lists: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    copies = False

    @staticmethod
    def page_bucket(pages: int, most: int) -> int:
        """One for all lengths."""
        return most

    def load(
        self, kv_lens: npt.NDArray[np.int32], block_tables: npt.NDArray[np.int32], slots: npt.NDArray[np.int64]
    ) -> None:
        """See `GatherDecode.load`; also plans for the settings known so far."""
        super().load(kv_lens, block_tables, slots)
        self._lists = self.padded_lists(kv_lens, block_tables)
        for setting, wrapper in self._wrappers.items():
            self._plan(wrapper, *setting)

    def padded_lists(
        self, kv_lens: npt.NDArray[np.int32], block_tables: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`page_lists` of a step, with rows that pad holding one token on the scratch page."""
        indptr, indices, last = page_lists(kv_lens, block_tables, self._page_size, self._scratch_page + 1)
        more = self._rows - len(kv_lens)
        return (
            torch.from_numpy(np.concatenate([indptr, indptr[-1] + np.arange(1, more + 1, dtype=np.int32)])),
            torch.from_numpy(np.concatenate([indices, np.full(more, self._scratch_page, np.int32)])),
            torch.from_numpy(np.concatenate([last, np.ones(more, np.int32)])),
        )

    def attend(
        self,
        q: torch.Tensor,
        k_planes: torch.Tensor,
        v_planes: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `GatherDecode.attend`."""
        setting = (scale, window, softcap, q.shape[1], k_planes.shape[0], q.shape[2], q.dtype, k_planes.dtype)
        wrapper = self._wrappers.get(setting)
        if wrapper is None:
            wrapper = self._wrappers[setting] = self._make()
            self._plan(wrapper, *setting)
        out: torch.Tensor = wrapper.run(q.contiguous(), (k_planes.transpose(0, 1), v_planes.transpose(0, 1)))
        return out

    def _make(self) -> Any:
        def buffer(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=self._at)

        return importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
            _workspace(self._at),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffer(self._rows + 1),
            paged_kv_indices_buffer=buffer(self._rows * self._most_pages),
            paged_kv_last_page_len_buffer=buffer(self._rows),
        )

    def _plan(
        self,
        wrapper: Any,
        scale: float,
        window: int | None,
        softcap: float | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        assert self._lists is not None
        wrapper.plan(
            *self._lists,
            heads,
            kv_heads,
            head_dim,
            self._page_size,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=softcap or None,
            q_data_type=q_dtype,
            kv_data_type=kv_dtype,
            sm_scale=scale,
        )
