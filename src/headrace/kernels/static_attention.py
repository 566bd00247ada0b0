"""Decode attention over buffers that never move: what a step must be made of to be captured as a CUDA graph.

One new row per sequence. The host fills the buffers before every step; all else is tensor operations of fixed shapes
that wait for nothing. The same operations run uncaptured on any device, which is how they are tested. The CUDA side has
not been run on a GPU yet.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from headrace.core.errors import ConfigError
from headrace.kernels.attention import AttentionBackend

_FEWEST_PAGES = 8


class GatherDecode:
    """Gathers every sequence's KV and attends with `scaled_dot_product_attention`, all rows at once.

    Reads the planes of `TorchAttention`, `[kv_heads, pages, page_size, head_dim]`. Every context is copied once per
    layer, padded to the bucket: FlashInfer does better where it is installed.

    Args:
        rows: rows of a step; a step of fewer sequences is padded.
        pages: most pages of a sequence.
        page_size: tokens per page, at least 2.
        scratch_page: a page that belongs to no sequence. Rows that pad write to its first slot; its last slot is never
            written, and stands for every position that a row does not see.
        device: of the planes.
    """

    def __init__(self, rows: int, pages: int, page_size: int, scratch_page: int, device: torch.device) -> None:
        self._rows, self._pages, self._page_size = rows, pages, page_size
        self._scratch_page = scratch_page
        self._host = np.zeros(rows * (2 + pages), np.int64)
        # One buffer, so that a step costs one copy.
        self._device = torch.zeros(len(self._host), dtype=torch.int64, device=device)
        self._slots, self._kv_lens = self._device[:rows], self._device[rows : 2 * rows]
        self._tables = self._device[2 * rows :].view(rows, pages)
        self._seen: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}

    #: Whether each layer copies the contexts it attends to.
    copies = True

    @staticmethod
    def page_bucket(pages: int, most: int) -> int:
        """For how many pages per sequence the step is made that needs `pages`; `most`: the longest sequence's."""
        return min(max(_FEWEST_PAGES, 1 << (pages - 1).bit_length()), most)

    def load(
        self, kv_lens: npt.NDArray[np.int32], block_tables: npt.NDArray[np.int32], slots: npt.NDArray[np.int64]
    ) -> None:
        """Fill the buffers for a step; arguments as for `AttentionBackend.plan`, one row per sequence, n <= rows."""
        n, rows, host = len(kv_lens), self._rows, self._host
        width = min(block_tables.shape[1], self._pages)
        host[:n], host[n:rows] = slots, self._scratch_page * self._page_size
        host[rows : rows + n], host[rows + n : 2 * rows] = kv_lens, 1
        tables = host[2 * rows :].reshape(rows, self._pages)
        tables[:n, :width] = block_tables[:, :width]
        tables[n:, :1] = self._scratch_page
        # From pageable memory: the numbers have left `host` when the call returns, so that it may be filled again.
        self._device.copy_(torch.from_numpy(host), non_blocking=True)

    def begin(self) -> None:
        """Start of a step's operations: forget what was derived from the buffers' last content."""
        self._seen.clear()

    def write(self, k: torch.Tensor, v: torch.Tensor, k_planes: torch.Tensor, v_planes: torch.Tensor) -> None:
        """Store new K and V `[rows, kv_heads, head_dim]`; see `AttentionBackend.write`."""
        for new, planes in ((k, k_planes), (v, v_planes)):
            _flat(planes).index_copy_(1, self._slots, new.transpose(0, 1).to(planes.dtype))

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
        """Attention of every row against its sequence's pages; see `AttentionBackend.attend`."""
        slots, seen = self._visible(window)
        k, v = (self._gather(planes, slots, q.dtype) for planes in (k_planes, v_planes))
        # The query heads of a kv head see the same keys: they are what a sequence of queries is elsewhere.
        grouped = q.unflatten(1, (k.shape[1], -1))
        mask = seen[:, None, None, :]
        if softcap:
            scores = (grouped @ k.transpose(2, 3)).float() * scale
            scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
            out = scores.softmax(-1).to(v.dtype) @ v
        else:
            out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return out.flatten(1, 2).contiguous()

    def _visible(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the positions that may be seen, and which are, `[rows, length]` each; the same in all layers."""
        if window not in self._seen:
            size, pages = self._page_size, self._pages
            lengths = self._kv_lens[:, None]
            first, count = torch.zeros_like(lengths), pages
            if window is not None:
                first = (lengths - window).clamp_min(0) // size
                count = min(pages, (window + size - 2) // size + 1)
            at = first * size + torch.arange(count * size, device=lengths.device)
            seen = at < lengths if window is None else (at < lengths) & (at >= lengths - window)
            pages_at = self._tables.gather(1, (at // size).clamp_max(pages - 1))
            # Unseen positions may hold what a failed sequence left, even NaN, which a weight of zero does not silence.
            blank = self._scratch_page * size + size - 1
            self._seen[window] = torch.where(seen, pages_at * size + at % size, blank), seen
        return self._seen[window]

    @staticmethod
    def _gather(planes: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[rows, kv_heads, length, head_dim]` of the slots `[rows, length]`."""
        found = _flat(planes).index_select(1, slots.flatten())
        gathered: torch.Tensor = found.unflatten(1, slots.shape).transpose(0, 1).to(dtype)
        return gathered


def static_decode(backend: AttentionBackend, dtype: str, kv_dtype: str, head_dim: int) -> type[GatherDecode]:
    """The fixed-buffer decode attention that reads a backend's planes.

    Args:
        backend: `TorchAttention` or one derived from it.
        dtype: of the queries.
        kv_dtype: of the planes.
        head_dim: of the model.

    Raises:
        ConfigError: the backend's pages are laid out in an order of its own.
    """
    if backend.name == "flashinfer":
        from headrace.kernels.cuda import flashinfer_runs
        from headrace.kernels.flashinfer_decode import FlashInferDecode

        if flashinfer_runs(getattr(torch, dtype), getattr(torch, kv_dtype), head_dim):
            return FlashInferDecode
    elif backend.name != "torch":
        raise ConfigError(f"attention kernel '{backend.name}' has no fixed-buffer decode; run without CUDA graphs")
    return GatherDecode


def _flat(planes: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, slots, head_dim]`."""
    return planes.view(planes.shape[0], -1, planes.shape[3])
