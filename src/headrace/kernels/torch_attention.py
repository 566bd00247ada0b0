"""Paged attention in plain torch: gather a sequence's pages, then scaled dot-product attention.

The fallback on CUDA where FlashInfer is missing, and the reference that tests run on CPU. It copies each context once
per call, so it is no choice for long contexts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from headrace.kernels.attention import LayerPlanes, Planes, check_plan, check_record


@dataclass(frozen=True, slots=True)
class TorchStep:
    """A step's rows per sequence and its tables on the device."""

    rows: int
    spans: tuple[tuple[int, int, int], ...]
    """(first row, rows, kv length) of each sequence."""
    tables: torch.Tensor
    stored: torch.Tensor
    """Rows whose KV is stored."""
    slots: torch.Tensor
    """Slots of those rows."""


class TorchAttention:
    """Attention by gather and `scaled_dot_product_attention`; a page is `[page_size, head_dim]` for K and V alike."""

    name = "torch"

    def __init__(self, device: str) -> None:
        self.device = device

    def k_page_shape(self, page_size: int, head_dim: int) -> tuple[int, int]:
        """Shape of one page of a K plane."""
        return page_size, head_dim

    def v_page_shape(self, page_size: int, head_dim: int) -> tuple[int, int]:
        """Shape of one page of a V plane."""
        return page_size, head_dim

    def plane_dtype(self, kv_dtype: str) -> torch.dtype:
        """The torch type of that name."""
        dtype = getattr(torch, kv_dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def warmup(self, page_size: int, kv_dtype: str) -> None:
        """Nothing to compile."""

    def plan(
        self,
        cu_q: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int64],
        *,
        num_heads: int,
        num_kv_heads: int,
    ) -> TorchStep:
        """See `AttentionBackend.plan`."""
        check_plan(cu_q, kv_lens, block_tables, slots, num_heads, num_kv_heads)
        stored = np.flatnonzero(slots >= 0)
        return TorchStep(
            rows=int(cu_q[-1]),
            spans=tuple(zip(cu_q[:-1].tolist(), np.diff(cu_q).tolist(), kv_lens.tolist())),
            tables=torch.from_numpy(np.ascontiguousarray(block_tables, np.int64)).to(self.device),
            stored=torch.from_numpy(stored).to(self.device),
            slots=torch.from_numpy(slots[stored]).to(self.device),
        )

    def write(self, step: TorchStep, k: torch.Tensor, v: torch.Tensor, k_planes: Planes, v_planes: Planes) -> None:
        """See `AttentionBackend.write`."""
        for new, planes in ((k, _tensor(k_planes)), (v, _tensor(v_planes))):
            heads, _pages, _page_size, dim = planes.shape
            flat = planes.view(heads, -1, dim)
            flat[:, step.slots] = new[step.stored].transpose(0, 1).to(planes.dtype)

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
        keys, values = _tensor(k_planes), _tensor(v_planes)
        kv_heads, _pages, page_size, _dim = keys.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for i, (row, count, length) in enumerate(step.spans):
            if not count:
                continue
            first = 0 if window is None else max(0, length - count - window + 1)
            first -= first % page_size
            pages = step.tables[i, first // page_size : -(-length // page_size)]
            k = keys[:, pages].flatten(1, 2)[:, : length - first].to(q.dtype)
            v = values[:, pages].flatten(1, 2)[:, : length - first].to(q.dtype)
            rows = q[row : row + count].transpose(0, 1)
            at = torch.arange(length - count, length, device=q.device)[:, None]
            seen = torch.arange(first, length, device=q.device)[None, :]
            mask = seen <= at if window is None else (seen <= at) & (seen > at - window)
            if softcap:
                group = rows.shape[0] // kv_heads
                scores = rows.unflatten(0, (kv_heads, group)) @ k.transpose(1, 2)[:, None] * scale
                scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
                result = (scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v[:, None]).flatten(0, 1)
            else:
                result = functional.scaled_dot_product_attention(
                    rows[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
                )[0]
            out[row : row + count] = result.transpose(0, 1)
        return out

    def read_pages(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend.read_pages`."""
        index = torch.from_numpy(pages).to(self.device)
        return _tensor(k_planes)[:, index].flatten(1, 2), _tensor(v_planes)[:, index].flatten(1, 2)

    def write_pages(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """See `AttentionBackend.write_pages`."""
        index = torch.from_numpy(pages).to(self.device)
        for planes, new in ((_tensor(k_planes), k), (_tensor(v_planes), v)):
            page_size = planes.shape[2]
            slots = (index[:, None] * page_size + torch.arange(page_size, device=self.device)).flatten()[: new.shape[1]]
            planes.view(planes.shape[0], -1, planes.shape[3])[:, slots] = new.to(planes)

    def copy_pages(
        self, k_planes: Planes, v_planes: Planes, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]
    ) -> None:
        """See `AttentionBackend.copy_pages`."""
        for planes in (_tensor(k_planes), _tensor(v_planes)):
            planes[:, torch.from_numpy(dst).to(self.device)] = planes[:, torch.from_numpy(src).to(self.device)]

    def load_records(
        self,
        k_planes: LayerPlanes,
        v_planes: LayerPlanes,
        pages: npt.NDArray[np.int64],
        first_token: int,
        n_tokens: int,
        records: memoryview,
        record_heads: int,
        first_head: int = 0,
    ) -> None:
        """See `AttentionBackend.load_records`. On a device it waits for the copies; not run on a GPU yet."""
        step = records.nbytes // len(k_planes)
        for layer, both in enumerate(zip(map(_tensor, k_planes), map(_tensor, v_planes), strict=True)):
            heads = slice(first_head, first_head + both[0].shape[0])
            if not 0 <= heads.start < heads.stop <= record_heads:
                raise ValueError(f"heads {heads.start} to {heads.stop - 1} of records of {record_heads} heads")
            record = records[layer * step : (layer + 1) * step]
            for planes, new in zip(both, self._halves(both[0], record_heads, pages, n_tokens, record)):
                slots = self._slots(planes, pages, first_token, n_tokens)
                rows = planes.view(planes.shape[0], -1, planes.shape[3])
                rows[:, slots] = new[heads, first_token:].to(planes.device)
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()  # the records are the caller's again

    def records_call(self, *arguments: Any, **more: Any) -> None:
        """See `AttentionBackend.records_call`: there is none."""
        return None

    def save_record(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64], n_tokens: int, record: memoryview
    ) -> None:
        """See `AttentionBackend.save_record`. On a device it waits for what is under way; not run on a GPU yet."""
        if self.device != "cpu":
            torch.cuda.synchronize()  # the step loop's stream writes what is saved
        both = _tensor(k_planes), _tensor(v_planes)
        for planes, out in zip(both, self._halves(both[0], both[0].shape[0], pages, n_tokens, record)):
            slots = self._slots(planes, pages, 0, n_tokens)
            out.copy_(planes.view(planes.shape[0], -1, planes.shape[3])[:, slots])

    def _slots(self, planes: torch.Tensor, pages: npt.NDArray[np.int64], first: int, last: int) -> torch.Tensor:
        at, size = np.arange(first, last), planes.shape[2]
        return torch.from_numpy(pages[at // size] * size + at % size).to(self.device)

    @staticmethod
    def _halves(
        planes: torch.Tensor, heads: int, pages: npt.NDArray[np.int64], n_tokens: int, record: memoryview
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a record as tensors on its memory, `[heads, tokens, dim]`."""
        _heads, _pages, page_size, dim = planes.shape
        check_record(pages, page_size, 0, n_tokens, 2 * heads * dim * planes.itemsize, record.nbytes)
        raw = torch.from_numpy(np.frombuffer(record, np.uint8)[: 2 * heads * n_tokens * dim * planes.itemsize])
        whole = raw.view(planes.dtype).view(2, heads, n_tokens, dim)
        return whole[0], whole[1]


def _tensor(planes: Planes | Any) -> torch.Tensor:
    return planes if isinstance(planes, torch.Tensor) else torch.from_numpy(planes)
