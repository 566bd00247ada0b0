"""Paged attention in plain torch: gather a sequence's pages, then scaled dot-product attention.

The fallback on CUDA where FlashInfer is missing, and the reference that tests run on CPU. It copies each context once
per call, so it is no choice for long contexts.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from headrace.kernels.attention import LayerPlanes, Planes, check_plan, check_record
from headrace.kernels.device_streams import CudaRecordStreams, RecordStreams


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
    """Attention by gather and `scaled_dot_product_attention`; a page is `[page_size, head_dim]` for K and V alike.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        streams: on which stored KV moves; default: on a device streams of its own.
    """

    name = "torch"

    def __init__(self, device: str, streams: RecordStreams | None = None) -> None:
        self.device = device
        self._streams = streams
        if streams is None and device != "cpu":
            self._streams = CudaRecordStreams(device)

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
            tables=self._upload(np.ascontiguousarray(block_tables, np.int64)),
            stored=self._upload(stored),
            slots=self._upload(slots[stored]),
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
        index = self._upload(pages)
        return _tensor(k_planes)[:, index].flatten(1, 2), _tensor(v_planes)[:, index].flatten(1, 2)

    def write_pages(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """See `AttentionBackend.write_pages`."""
        index = self._upload(pages)
        for planes, new in ((_tensor(k_planes), k), (_tensor(v_planes), v)):
            page_size = planes.shape[2]
            slots = (index[:, None] * page_size + torch.arange(page_size, device=self.device)).flatten()[: new.shape[1]]
            planes.view(planes.shape[0], -1, planes.shape[3])[:, slots] = new.to(planes)

    def copy_pages(
        self, k_planes: Planes, v_planes: Planes, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]
    ) -> None:
        """See `AttentionBackend.copy_pages`."""
        source, target = self._upload(src), self._upload(dst)
        for planes in (_tensor(k_planes), _tensor(v_planes)):
            planes[:, target] = planes[:, source]

    def pages_free(self) -> None:
        """See `AttentionBackend.pages_free`."""
        if self._streams is not None:
            self._streams.pages_free()

    def kv_written(self) -> None:
        """See `AttentionBackend.kv_written`."""
        if self._streams is not None:
            self._streams.kv_written()

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
        """See `AttentionBackend.load_records`. To a device the records go in one copy, on the thread's own stream."""
        both = [(_tensor(k), _tensor(v)) for k, v in zip(k_planes, v_planes, strict=True)]
        first = both[0][0]
        heads = slice(first_head, first_head + first.shape[0])
        if not 0 <= heads.start < heads.stop <= record_heads:
            raise ValueError(f"heads {heads.start} to {heads.stop - 1} of records of {record_heads} heads")
        raw = _records(first, record_heads, pages, first_token, n_tokens, records, len(both))
        with nullcontext() if self._streams is None else self._streams.loading():
            slots = self._slots(first, pages, first_token, n_tokens)
            new = _halves(raw.to(self.device, non_blocking=True), first, record_heads, n_tokens)
            for layer, planes in enumerate(both):
                for half, plane in enumerate(planes):
                    rows = plane.view(plane.shape[0], -1, plane.shape[3])
                    rows[:, slots] = new[layer, half, heads, first_token:]

    def records_call(self, *arguments: Any, **more: Any) -> None:
        """See `AttentionBackend.records_call`: there is none."""
        return None

    def save_record(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64], n_tokens: int, record: memoryview
    ) -> None:
        """See `AttentionBackend.save_record`. From a device on the thread's own stream."""
        both = _tensor(k_planes), _tensor(v_planes)
        heads = both[0].shape[0]
        out = _halves(_records(both[0], heads, pages, 0, n_tokens, record, 1), both[0], heads, n_tokens)
        with nullcontext() if self._streams is None else self._streams.saving():
            slots = self._slots(both[0], pages, 0, n_tokens)
            for half, plane in enumerate(both):
                rows = plane.view(heads, -1, plane.shape[3])
                out[0, half].copy_(rows[:, slots], non_blocking=True)

    def _slots(self, planes: torch.Tensor, pages: npt.NDArray[np.int64], first: int, last: int) -> torch.Tensor:
        at, size = np.arange(first, last), planes.shape[2]
        return self._upload(pages[at // size] * size + at % size)

    def _upload(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """On the device; a copy from ordinary memory has left it when the call returns, so nobody waits for it."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _records(
    planes: torch.Tensor,
    heads: int,
    pages: npt.NDArray[np.int64],
    first_token: int,
    n_tokens: int,
    records: memoryview,
    layers: int,
) -> torch.Tensor:
    """Records of adjacent layers as bytes `[layers, bytes of a record]`, zero copy, if they are long enough."""
    token_bytes = 2 * heads * planes.shape[3] * planes.itemsize
    check_record(pages, planes.shape[2], first_token, n_tokens, token_bytes, records.nbytes // layers)
    return torch.from_numpy(np.frombuffer(records, np.uint8)).view(layers, -1)


def _halves(raw: torch.Tensor, planes: torch.Tensor, heads: int, n_tokens: int) -> torch.Tensor:
    """K and V of records, `[layers, 2, heads, tokens, dim]` of the planes' type; zero copy."""
    dim = planes.shape[3]
    payload = raw[:, : 2 * heads * n_tokens * dim * planes.itemsize]
    return payload.view(planes.dtype).view(-1, 2, heads, n_tokens, dim)


def _tensor(planes: Planes | Any) -> torch.Tensor:
    return planes if isinstance(planes, torch.Tensor) else torch.from_numpy(planes)
