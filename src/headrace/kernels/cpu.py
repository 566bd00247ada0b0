"""Paged attention on CPU, compiled by Numba.

K pages are stored transposed, `[head_dim, page_size]`, so that scores are computed for many tokens at once; V pages are
`[page_size, head_dim padded to 16]`. KV is float32, bfloat16 or float16; all arithmetic is float32. With 16-bit KV the
result is that of rounded K and V: a relative error of 2^-9 (bfloat16) or 2^-12 (float16) per stored element at most.
"""

import functools
import platform
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding  # type: ignore[import-untyped]
from numba import types

from headrace.core.errors import ConfigError
from headrace.kernels import openmp, paged, paged_write
from headrace.kernels import records as record_kernels
from headrace.kernels.attention import LayerPlanes, Planes, check_plan, check_record
from headrace.kernels.compiled import c_function
from headrace.kernels.workplan import NumbaStep, cut

_SOURCES = ("vectors.py", "memory.py", "tiles.py", "tile_rows.py", "paged.py", "paged_write.py")
_LOG2_E = 1.4426950408889634
_ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}
_PAGE_SIZES = (8, 16, 32, 64, 128, 256)
_SERIAL_ELEMENTS = 1 << 12
"""Writes of fewer elements than this are not worth waking other threads."""


@functools.cache
def _lanes() -> tuple[int, int]:
    """Float32 lanes of a vector register and vectors of tokens per tile: what 32 or 16 registers can hold."""
    return (16, 4) if binding.get_host_cpu_features().get("avx512f") else (8, 2)


@functools.cache
def _attend(element: Any, lanes: int, strips: int) -> tuple[Any, np.dtype[Any]]:
    record = paged.attend_record(element, lanes, strips)
    return c_function(types.void(types.CPointer(numba.from_dtype(record))), paged.attend_kernel, _SOURCES), record


@functools.cache
def _write(element: Any) -> tuple[Any, np.dtype[Any]]:
    record = paged_write.write_record(element)
    return c_function(types.void(types.CPointer(numba.from_dtype(record))), paged_write.write_kernel, _SOURCES), record


def _element(planes: Planes) -> tuple[str, Any]:
    """Name of the stored type and the numpy type that stands for it."""
    name = str(planes.dtype).removeprefix("torch.")
    name = {"uint16": "bfloat16"}.get(name, name)
    if name not in _ELEMENTS:
        raise ConfigError(f"KV of type '{name}' cannot be attended on CPU; use float32, bfloat16 or float16")
    return name, _ELEMENTS[name]


def _address(array: Planes) -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else int(array.__array_interface__["data"][0])


def _strides(planes: Planes) -> tuple[int, ...]:
    """Bytes from (layer to layer,) head to head, from page to page, and per element; pages must be dense."""
    size = planes.itemsize
    strides = tuple(s * size for s in planes.stride()) if isinstance(planes, torch.Tensor) else planes.strides
    if strides[-2:] != (planes.shape[-1] * size, size):
        raise ValueError(f"pages must be dense, got strides {strides} for shape {tuple(planes.shape)}")
    return *strides[:-2], size


def _rows(x: torch.Tensor) -> torch.Tensor:
    """As float32 with a dense last dimension; a view where it is that already."""
    x = x if x.dtype == torch.float32 else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


class _Call:
    """A prepared argument of a kernel, whose record starts with four addresses, and the memory it points to."""

    def __init__(
        self,
        kernel: int,
        argument: npt.NDArray[Any],
        tickets: npt.NDArray[np.int64],
        held: tuple[npt.NDArray[Any], ...],
    ) -> None:
        self.kernel = kernel
        self.argument = argument
        self.address = argument.ctypes.data
        self.pointers = argument.view(np.uint8)[: 4 * 8].view(np.int64)
        self.tickets = tickets
        self.held = held


class NumbaAttention:
    """The CPU backend.

    Args:
        threads: how many threads attend; 0: as many as torch uses.

    Raises:
        ConfigError: the CPU is too old, or several threads are wanted and torch has no OpenMP runtime to lend them.
    """

    name = "numba"
    device = "cpu"

    def __init__(self, threads: int = 0) -> None:
        if platform.machine() in ("x86_64", "AMD64") and not binding.get_host_cpu_features().get("fma"):
            raise ConfigError("this CPU has no FMA instructions; choose attention kernel 'torch'")
        self.threads = openmp.check(threads)

    def k_page_shape(self, page_size: int, head_dim: int) -> tuple[int, int]:
        """`(head_dim, page_size)`.

        Raises:
            ConfigError: the kernel has no such page size.
        """
        if page_size not in _PAGE_SIZES:
            raise ConfigError(f"page size {page_size} has no kernel; use one of {', '.join(map(str, _PAGE_SIZES))}")
        return head_dim, page_size

    def v_page_shape(self, page_size: int, head_dim: int) -> tuple[int, int]:
        """`(page_size, head_dim)`, the latter padded to a multiple of 16."""
        return page_size, -(-head_dim // 16) * 16

    def plane_dtype(self, kv_dtype: str) -> Any:
        """The numpy type to allocate: float32, float16, or uint16 for bfloat16."""
        return {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[kv_dtype]

    def warmup(self, page_size: int, kv_dtype: str) -> None:
        """Compiles the kernels of a page size and stored type, or loads them from the cache."""
        self._attend_for(page_size, _ELEMENTS[kv_dtype])
        _write(_ELEMENTS[kv_dtype])
        record_kernels.kernels()

    def _attend_for(self, page_size: int, element: Any) -> tuple[Any, np.dtype[Any]]:
        lanes, strips = _lanes()
        return _attend(element, min(lanes, page_size), strips)

    def plan(
        self,
        cu_q: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int64],
        *,
        num_heads: int,
        num_kv_heads: int,
    ) -> NumbaStep:
        """See `AttentionBackend.plan`."""
        check_plan(cu_q, kv_lens, block_tables, slots, num_heads, num_kv_heads)
        return cut(cu_q, kv_lens, block_tables, slots, num_heads // num_kv_heads, self.threads)

    def write(self, step: NumbaStep, k: torch.Tensor, v: torch.Tensor, k_planes: Planes, v_planes: Planes) -> None:
        """See `AttentionBackend.write`."""
        if not step.rows:
            return
        k, v = _rows(k), _rows(v)
        key = (k.shape, k.stride(), v.shape, v.stride(), k_planes.shape, v_planes.shape, k_planes.dtype)
        call = step.calls.get(key)
        if call is None:
            call = step.calls[key] = self._prepare_write(step, k, v, k_planes, v_planes)
        call.pointers[:] = k.data_ptr(), v.data_ptr(), _address(k_planes), _address(v_planes)
        call.tickets[:] = 0
        openmp.run(call.kernel, call.address, 1 if k.numel() < _SERIAL_ELEMENTS else self.threads)

    def _prepare_write(
        self, step: NumbaStep, k: torch.Tensor, v: torch.Tensor, k_planes: Planes, v_planes: Planes
    ) -> _Call:
        """The argument of the writing kernel but for the addresses of new and stored K and V."""
        kernel, record = _write(_element(k_planes)[1])
        kv_heads, _pages, dim, page_size = k_planes.shape
        if k.shape != (step.rows, kv_heads, dim) or v.shape != k.shape:
            raise ValueError(
                f"K {tuple(k.shape)} and V {tuple(v.shape)} do not fit {step.rows} rows of {kv_heads}x{dim}"
            )
        argument = np.zeros(1, record)
        a = argument[0]
        tickets = np.zeros(1, np.int64)
        block = 16
        a["tickets"], a["slots"] = tickets.ctypes.data, step.slots.ctypes.data
        a["rows"], a["block"], a["items"] = step.rows, block, -(-step.rows // block) * kv_heads
        a["k_row"], a["k_col"], a["v_row"], a["v_col"] = (4 * s for x in (k, v) for s in x.stride()[:2])
        a["k_head"], a["k_page"], _ = _strides(k_planes)
        a["v_head"], a["v_page"], _ = _strides(v_planes)
        a["page_size"], a["dim"], a["padded"], a["kv_heads"] = page_size, dim, v_planes.shape[3], kv_heads
        return _Call(kernel.address, argument, tickets, ())

    def attend(
        self,
        step: NumbaStep,
        q: torch.Tensor,
        k_planes: Planes,
        v_planes: Planes,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        dtype = q.dtype
        q = _rows(q)
        if not step.rows:
            return torch.empty(q.shape, dtype=dtype)
        # What is the same in all layers (mostly) is prepared once; a call then fills in addresses.
        key = (q.shape, q.stride(), k_planes.shape, v_planes.shape, k_planes.dtype, scale, window, softcap)
        call = step.calls.get(key)
        if call is None:
            call = step.calls[key] = self._prepare(step, q, k_planes, v_planes, scale, window, softcap)
        out = torch.empty(q.shape, dtype=torch.float32)
        call.pointers[:] = q.data_ptr(), out.data_ptr(), _address(k_planes), _address(v_planes)
        call.tickets[:] = 0
        openmp.run(call.kernel, call.address, self.threads)
        return out if dtype == torch.float32 else out.to(dtype)

    def _prepare(
        self,
        step: NumbaStep,
        q: torch.Tensor,
        k_planes: Planes,
        v_planes: Planes,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> _Call:
        """The kernel's argument but for the addresses of q, out, K and V."""
        kv_heads, _pages, dim, page_size = k_planes.shape
        heads = kv_heads * step.group
        if q.shape != (step.rows, heads, dim):
            raise ValueError(
                f"q {tuple(q.shape)} does not fit {step.rows} rows of {kv_heads}x{step.group} heads x {dim}"
            )
        if step.block_tables.shape[1] * page_size < step.longest:
            raise ValueError(f"block tables of {step.block_tables.shape[1]} pages do not hold {step.longest} tokens")
        kernel, record = self._attend_for(page_size, _element(k_planes)[1])
        lanes, strips = record["kv"].shape
        padded = v_planes.shape[3]
        row = padded + paged.STATS
        scratch_step = paged.scratch_bytes(lanes, strips, padded, int(step.tiles[:, 2].max()) * step.group)
        scratch = step.buffer("scratch", self.threads * scratch_step + 64, np.uint8)
        partials = step.buffer("partials", step.partial_rows * heads * row, np.float32)
        finished = step.buffer("finished", len(step.tiles) * kv_heads, np.int64)
        argument = np.zeros(1, record)
        tickets = np.zeros(16, np.int64)
        a = argument[0]
        a["tickets"], a["work"], a["tiles"] = tickets.ctypes.data, step.work.ctypes.data, step.tiles.ctypes.data
        a["finished"], a["tables"] = finished.ctypes.data, step.block_tables.ctypes.data
        a["partials"], a["scratch"] = partials.ctypes.data, -(-scratch.ctypes.data // 64) * 64
        a["items"], a["table_step"] = len(step.work) * kv_heads, step.block_tables.shape[1]
        a["q_row"], a["q_head"] = 4 * q.stride(0), 4 * q.stride(1)
        a["out_row"], a["out_head"] = 4 * heads * dim, 4 * dim
        a["k_head"], a["k_page"], a["item_size"] = _strides(k_planes)
        a["v_head"], a["v_page"], _ = _strides(v_planes)
        a["page_shift"], a["dim"], a["padded"] = page_size.bit_length() - 1, dim, padded
        a["group"], a["kv_heads"] = step.group, kv_heads
        a["window"] = window or 1 << 30
        a["scratch_step"] = scratch_step
        # Softmax in powers of two; tanh wants its argument before the cap.
        a["q_scale"] = scale / softcap if softcap else scale * _LOG2_E
        a["cap"] = softcap * _LOG2_E if softcap else 0.0
        return _Call(kernel.address, argument, tickets, (scratch, partials, finished))

    def read_pages(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend.read_pages`."""
        k, v = _tensor(k_planes), _tensor(v_planes)
        index = torch.from_numpy(np.ascontiguousarray(pages, np.int64))
        dim = k.shape[2]
        return k[:, index].transpose(2, 3).reshape(k.shape[0], -1, dim), v[:, index, :, :dim].flatten(1, 2)

    def write_pages(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """See `AttentionBackend.write_pages`."""
        keys, values = _tensor(k_planes), _tensor(v_planes)
        dim, page_size = keys.shape[2:]
        for nth, page in enumerate(pages.tolist()):
            new_k, new_v = (x[:, nth * page_size : (nth + 1) * page_size].to(keys.dtype) for x in (k, v))
            keys[:, page, :, : new_k.shape[1]] = new_k.transpose(1, 2)
            values[:, page, : new_v.shape[1], :dim] = new_v

    def copy_pages(
        self, k_planes: Planes, v_planes: Planes, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]
    ) -> None:
        """See `AttentionBackend.copy_pages`."""
        for planes in (np.asarray(k_planes), np.asarray(v_planes)):
            planes[:, dst] = planes[:, src]

    def pages_free(self) -> None:
        """See `AttentionBackend.pages_free`: what was asked for is done."""

    def kv_written(self) -> None:
        """See `AttentionBackend.kv_written`: what was asked for is done."""

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
        """See `AttentionBackend.load_records`."""
        record_kernels.run(
            True, _records_call(k_planes, v_planes, pages, first_token, n_tokens, records, record_heads, first_head)
        )

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
    ) -> tuple[int, int, object]:
        """See `AttentionBackend.records_call`."""
        return record_kernels.call(
            _records_call(k_planes, v_planes, pages, first_token, n_tokens, records, record_heads, first_head)
        )

    def save_record(
        self, k_planes: Planes, v_planes: Planes, pages: npt.NDArray[np.int64], n_tokens: int, record: memoryview
    ) -> None:
        """See `AttentionBackend.save_record`."""
        heads = k_planes.shape[0]
        record_kernels.run(False, _records_call(k_planes[None], v_planes[None], pages, 0, n_tokens, record, heads, 0))


def _records_call(
    k_planes: Planes | LayerPlanes,
    v_planes: Planes | LayerPlanes,
    pages: npt.NDArray[np.int64],
    first: int,
    n_tokens: int,
    records: memoryview,
    record_heads: int,
    first_head: int,
) -> list[int]:
    """The argument of a record kernel: the values of `records.FIELDS`. Planes are `[layers, kv_heads, pages, ...]`."""
    if isinstance(k_planes, Sequence) or isinstance(v_planes, Sequence):
        raise TypeError("planes of adjacent layers are one array here")
    layers, heads, _pages, dim, page_size = k_planes.shape
    *k_strides, itemsize = _strides(k_planes)
    *v_strides, _ = _strides(v_planes)
    if not 0 <= first_head <= record_heads - heads:
        raise ValueError(f"heads {first_head} to {first_head + heads - 1} of records of {record_heads} heads")
    half = record_heads * n_tokens * dim * itemsize
    step = records.nbytes // layers
    check_record(pages, page_size, first, n_tokens, 2 * record_heads * dim * itemsize, step)
    where = _address(np.frombuffer(records, np.uint8)) + first_head * n_tokens * dim * itemsize
    return [
        where, _address(k_planes), _address(v_planes), _address(pages), step, half, *k_strides, *v_strides,
        layers, heads, n_tokens, first, n_tokens, dim, page_size, v_planes.shape[-1], itemsize,
    ]  # fmt: skip


def _tensor(planes: Planes) -> torch.Tensor:
    """Planes as a tensor on the same memory, of the real stored type."""
    if isinstance(planes, torch.Tensor):
        return planes
    tensor = torch.from_numpy(planes)
    return tensor.view(torch.bfloat16) if planes.dtype == np.uint16 else tensor
