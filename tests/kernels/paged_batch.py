"""A packed batch with its KV in shuffled pages, and the dense float64 attention it is compared with."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.attention import AttentionBackend, Planes


def empty_planes(
    backend: AttentionBackend, kv_heads: int, pages: int, page_size: int, dim: int, kv_dtype: str
) -> tuple[Planes, Planes]:
    """K and V planes full of NaN, as pages that were never written may be."""
    found = []
    for shape in (backend.k_page_shape(page_size, dim), backend.v_page_shape(page_size, dim)):
        tensor = torch.full((kv_heads, pages, *shape), torch.nan, dtype=getattr(torch, kv_dtype))
        wanted = backend.plane_dtype(kv_dtype)
        if isinstance(wanted, torch.dtype):
            found.append(tensor)
        else:
            found.append(tensor.view(torch.int16).numpy().view(wanted) if tensor.itemsize == 2 else tensor.numpy())
    return found[0], found[1]


@dataclass
class PagedBatch:
    """Sequences given as (new rows, length in all), with random q, k and v for every position."""

    backend: AttentionBackend
    sequences: list[tuple[int, int]]
    kv_heads: int = 2
    group: int = 3
    dim: int = 32
    page_size: int = 16
    kv_dtype: str = "float32"
    seed: int = 0
    tables: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        self.lengths = [length for _, length in self.sequences]
        counts = [-(-length // self.page_size) for length in self.lengths]
        order = random.permutation(sum(counts) + 2)
        self.tables = np.full((len(counts), max(counts) + 1), -(1 << 30), np.int32)
        at = 0
        for i, count in enumerate(counts):
            self.tables[i, :count] = order[at : at + count]
            at += count
        self.k = [torch.randn(length, self.kv_heads, self.dim) for length in self.lengths]
        self.v = [torch.randn(length, self.kv_heads, self.dim) for length in self.lengths]
        self.q = [torch.randn(length, self.kv_heads * self.group, self.dim) for length in self.lengths]
        self.planes = empty_planes(self.backend, self.kv_heads, len(order), self.page_size, self.dim, self.kv_dtype)
        self.write([(0, length) for length in self.lengths])

    def slots(self, spans: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
        """Slots of the positions `start..end-1` of each sequence."""
        parts = [np.zeros(0, np.int64)]
        for table, (start, end) in zip(self.tables, spans):
            at = np.arange(start, end)
            parts.append(table[at // self.page_size].astype(np.int64) * self.page_size + at % self.page_size)
        return np.concatenate(parts)

    def plan(self, sequences: list[tuple[int, int]], which: list[int] | None = None):  # type: ignore[no-untyped-def]
        """Plan of (new rows, length) for some of the sequences (default: all)."""
        which = list(range(len(sequences))) if which is None else which
        cu_q = np.concatenate([[0], np.cumsum([rows for rows, _ in sequences])]).astype(np.int32)
        kv_lens = np.array([length for _, length in sequences], np.int32)
        slots = np.full(cu_q[-1], -1, np.int64)
        return self.backend.plan(
            cu_q, kv_lens, self.tables[which], slots, num_heads=self.kv_heads * self.group, num_kv_heads=self.kv_heads
        )

    def write(self, spans: list[tuple[int, int]]) -> None:
        """Stores the KV of some positions."""
        cu_q = np.concatenate([[0], np.cumsum([end - start for start, end in spans])]).astype(np.int32)
        step = self.backend.plan(
            cu_q,
            np.array([end for _, end in spans], np.int32),
            self.tables,
            self.slots(spans),
            num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
        )
        k, v = (torch.cat([x[a:b] for x, (a, b) in zip(full, spans)]) for full in (self.k, self.v))
        self.backend.write(step, k, v, *self.planes)

    def attend(
        self,
        sequences: list[tuple[int, int]] | None = None,
        which: list[int] | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> list[torch.Tensor]:
        """Output per sequence."""
        sequences = self.sequences if sequences is None else sequences
        which = list(range(len(sequences))) if which is None else which
        q = torch.cat([self.q[i][length - rows : length] for i, (rows, length) in zip(which, sequences)])
        step = self.plan(sequences, which)
        out = self.backend.attend(step, q, *self.planes, scale=self.dim**-0.5, window=window, softcap=softcap)
        return list(out.split([rows for rows, _ in sequences]))

    def dense(self, window: int | None = None, softcap: float | None = None) -> list[torch.Tensor]:
        """What `attend` should give, in float64 without pages."""
        found = []
        for q, k, v, (rows, length) in zip(self.q, self.k, self.v, self.sequences):
            k, v = (x.double().repeat_interleave(self.group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[length - rows :].double(), k) * self.dim**-0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            at, key = torch.arange(length - rows, length)[:, None], torch.arange(length)[None]
            seen = (key <= at) & (key > at - (window or length + 1))
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            found.append(torch.einsum("hqk,khd->qhd", weights, v))
        return found


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest absolute difference; NaN where there is one."""
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(found, wanted))
