"""The paged attention interface that the engine calls, and the choice of its implementation.

A *plane* is the KV of one layer and one kv head: `[pages, *page_shape]`. The planes of a layer are one array
`[kv_heads, pages, *page_shape]`; each backend says how a page is laid out inside (`k_page_shape`, `v_page_shape`) and
nobody else looks into a page. Which heads, how many and how wide follows from the shapes of the arguments, so the same
calls serve a subset of the kv heads.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.errors import ConfigError

KV_DTYPES = ("float32", "bfloat16", "float16")

Planes = npt.NDArray[Any] | torch.Tensor
"""K or V of one layer, `[kv_heads, pages, *page_shape]`: an array on CPU, a tensor on CUDA."""

LayerPlanes = npt.NDArray[Any] | Sequence[torch.Tensor]
"""K or V of adjacent layers: an array `[layers, kv_heads, pages, *page_shape]` on CPU, a tensor for each on CUDA."""


class StepAttention(Protocol):
    """What one step's attention calls share: who the packed rows belong to and how the work is divided.

    Made by `AttentionBackend.plan`, used by all layers of the step, by one thread at a time.
    """

    @property
    def rows(self) -> int:
        """Number of packed rows (tokens) of the step."""
        ...


@runtime_checkable
class AttentionBackend(Protocol):
    """Writes new KV into pages and attends packed rows against them."""

    name: str
    device: str

    def k_page_shape(self, page_size: int, head_dim: int) -> tuple[int, int]:
        """Shape of one page of a K plane."""
        ...

    def v_page_shape(self, page_size: int, head_dim: int) -> tuple[int, int]:
        """Shape of one page of a V plane."""
        ...

    def plane_dtype(self, kv_dtype: str) -> Any:
        """Element type to allocate planes with for one of `KV_DTYPES`: a numpy type on CPU, a torch type on CUDA."""
        ...

    def warmup(self, page_size: int, kv_dtype: str) -> None:
        """Compiles (or loads from the cache) what planes of this kind need; idempotent."""
        ...

    def plan(
        self,
        cu_q: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int64],
        *,
        num_heads: int,
        num_kv_heads: int,
    ) -> StepAttention:
        """Divides a step's work once, for all layers.

        Args:
            cu_q: `[n + 1]`; sequence i owns the packed rows `cu_q[i]:cu_q[i + 1]`.
            kv_lens: `[n]`; tokens of sequence i in the cache once this step's are written: its rows have the positions
                `kv_lens[i] - (cu_q[i + 1] - cu_q[i]) .. kv_lens[i] - 1`.
            block_tables: `[n, max_pages]`; page of each run of `page_size` positions. Entries past the last page may
                hold anything; so may entries wholly before a layer's window.
            slots: `[rows]`; `page * page_size + offset` where a row's KV goes; negative: it is not stored.
            num_heads: query heads per row; only the ratio to `num_kv_heads` matters.
            num_kv_heads: kv heads.

        Raises:
            ValueError: the arrays contradict each other.
        """
        ...

    def write(self, step: Any, k: torch.Tensor, v: torch.Tensor, k_planes: Planes, v_planes: Planes) -> None:
        """Stores new K and V `[rows, kv_heads, head_dim]` (any strides) at the step's slots; idempotent."""
        ...

    def attend(
        self,
        step: Any,
        q: torch.Tensor,
        k_planes: Planes,
        v_planes: Planes,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of every row against its sequence's pages.

        Args:
            step: what `plan` returned.
            q: `[rows, heads, head_dim]`, any strides with a dense last dimension; head h reads kv head
                `h // (heads / kv_heads)`.
            k_planes: K of the layer.
            v_planes: V of the layer.
            scale: factor of the scores before the softmax.
            window: a row at position p sees positions `p - window + 1 .. p` (Transformers' sliding window); None: all.
            softcap: c in `c * tanh(score / c)` (Gemma 2); None or 0: none.

        Returns:
            `[rows, heads, head_dim]`, contiguous, of q's dtype. A row's values do not depend on its batch neighbours.
        """
        ...

    def read_pages(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies pages out in canonical order: K and V `[kv_heads, len(pages) * page_size, head_dim]`."""
        ...

    def write_pages(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """The inverse of `read_pages`; the last page may be given partly (fewer tokens)."""
        ...

    def copy_pages(
        self, k_planes: Planes, v_planes: Planes, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]
    ) -> None:
        """Copies page `src[i]` to page `dst[i]` for every i; all are read before any is written."""
        ...

    def pages_free(self) -> None:
        """In the step loop, before records are loaded: whatever still uses their pages was asked for before this."""
        ...

    def kv_written(self) -> None:
        """In the step loop, before records are saved: whatever writes their KV was asked for before this."""
        ...

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
        """Copies tokens `first_token..n_tokens-1` of the stored records of adjacent layers into pages, bit for bit.

        May be called from any thread, several at once, beside the step loop; it holds no interpreter lock while it
        copies, and uses no other thread.

        Args:
            k_planes: K of the layers, of the heads to copy.
            v_planes: V of the layers, of the same heads.
            pages: page `i` takes tokens `i * page_size ..` of each record; there is one for each token of a record.
            first_token: of the records; those before it are in their pages already.
            n_tokens: tokens of a record.
            records: one for each layer, all of the same size, one behind the other. Each is K then V, each
                `[record_heads, n_tokens, head_dim]` of the stored type, and padding.
            record_heads: heads of a record.
            first_head: number, among these, of the first one to copy.

        Raises:
            ValueError: the records have too few bytes or heads, or there are too few pages.
        """
        ...

    def records_call(
        self,
        k_planes: LayerPlanes,
        v_planes: LayerPlanes,
        pages: npt.NDArray[np.int64],
        first_token: int,
        n_tokens: int,
        records: memoryview,
        record_heads: int,
        first_head: int = 0,
    ) -> tuple[int, int, object] | None:
        """`load_records` as a C function `void (void *)`, for whoever calls it among other machine code.

        Returns:
            Address of the function, its argument, and what must stay alive until it has returned; None: there is none.

        Raises:
            ValueError: as `load_records`.
        """
        ...

    def save_record(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64], n_tokens: int, record: memoryview
    ) -> None:
        """The inverse of `load_records` for all tokens and heads of one layer's record; may be called as that.

        Raises:
            ValueError: the record or the list of pages is too short.
        """
        ...


def backend_for(device: str, *, threads: int = 0, name: str = "auto") -> AttentionBackend:
    """The attention backend of a device.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        threads: CPU threads; 0: what torch uses.
        name: `auto`; or `numba` (CPU), `flashinfer` (CUDA), `torch` (any).

    Raises:
        ConfigError: the device or the name is unknown, or what it needs is missing.
    """
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device '{device}' has no attention kernel; use 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{device}' needs a CUDA build of torch and a GPU; found none, use --device cpu")
    if name == "auto":
        name = "numba" if kind == "cpu" else "cuda"
    if name == "numba" and kind == "cpu":
        from headrace.kernels.cpu import NumbaAttention

        return NumbaAttention(threads)
    if name == "torch":
        from headrace.kernels.torch_attention import TorchAttention

        return TorchAttention(device)
    if name in ("cuda", "flashinfer") and kind == "cuda":
        from headrace.kernels.cuda import cuda_backend

        return cuda_backend(device, require_flashinfer=name == "flashinfer")
    raise ConfigError(f"attention kernel '{name}' does not run on '{device}'; use 'auto'")


def check_record(
    pages: npt.NDArray[np.int64], page_size: int, first: int, n_tokens: int, token_bytes: int, nbytes: int
) -> None:
    """Raises ValueError when a record of so many bytes or its pages do not hold `n_tokens` tokens."""
    wanted = n_tokens * token_bytes
    if nbytes < wanted or len(pages) * page_size < n_tokens or not 0 <= first <= n_tokens:
        raise ValueError(
            f"{n_tokens} tokens from token {first} need a record of {wanted} bytes and their pages, "
            f"got {nbytes} bytes and {len(pages)} pages of {page_size}"
        )


def check_plan(
    cu_q: npt.NDArray[np.int32],
    kv_lens: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int64],
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Raises ValueError when the arguments of `AttentionBackend.plan` contradict each other."""
    n = len(kv_lens)
    if len(cu_q) != n + 1 or len(block_tables) != n or cu_q[0] != 0:
        raise ValueError(
            f"{n} kv_lens need {n + 1} cu_q from 0 and {n} block tables, got {len(cu_q)}, {len(block_tables)}"
        )
    lengths = np.diff(cu_q)
    if n and (lengths.min() < 0 or (kv_lens < lengths).any()):
        raise ValueError(f"rows per sequence {lengths.tolist()} do not fit cached lengths {kv_lens.tolist()}")
    if len(slots) != cu_q[-1]:
        raise ValueError(f"{cu_q[-1]} rows need as many slots, got {len(slots)}")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads are no multiple of {num_kv_heads} kv heads")
