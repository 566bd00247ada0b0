"""KV planes: memory in reserved address space, committed by use and given back by range."""

import contextlib
import mmap
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from headrace.kernels.attention import LayerPlanes

PAGE_BYTES = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the standard library's `mmap` yet


class Planes(Protocol):
    """K or V of a group: one plane per (layer, kv head), each `[pages, *page_shape]`."""

    def layer(self, layer: int) -> Any:
        """The planes of one layer (index within the group), `[heads, pages, *page_shape]`, zero copy."""
        ...

    def layers(self, layers: range, heads: range) -> LayerPlanes:
        """The planes of adjacent layers and heads (indexes within the group), zero copy."""
        ...

    def commit_pages(self, first: int, last: int) -> None:
        """Have the memory of pages `first..last-1` of every plane ready; without this it comes as it is written."""
        ...

    def release_pages(self, first: int, last: int) -> None:
        """Give the memory of pages `first..last-1` of every plane back; their content is lost."""
        ...

    def release_planes(self, layers: Iterable[int], heads: Iterable[int]) -> None:
        """Give whole planes back (their layers or heads moved away)."""
        ...


class HostPlanes:
    """Planes in anonymous memory. The kernel commits a page of memory when it is first written.

    Reserving costs address space only, so `pages` is the largest number the group may ever grow to.
    """

    def __init__(self, layers: int, heads: int, pages: int, page_shape: tuple[int, ...], dtype: DTypeLike) -> None:
        dtype = np.dtype(dtype)
        self._page_nbytes = int(np.prod(page_shape)) * dtype.itemsize
        self._plane_nbytes = self._page_nbytes * pages
        self._layers, self._heads = layers, heads
        size = max(layers * heads * self._plane_nbytes, PAGE_BYTES)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._map = mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        count = layers * heads * pages * int(np.prod(page_shape))
        flat: NDArray[Any] = np.frombuffer(self._map, dtype=dtype, count=count)
        self._array = flat.reshape(layers, heads, pages, *page_shape)

    def layer(self, layer: int) -> NDArray[Any]:
        """The planes of one layer, `[heads, pages, *page_shape]`."""
        planes: NDArray[Any] = self._array[layer]
        return planes

    def layers(self, layers: range, heads: range) -> NDArray[Any]:
        """The planes of adjacent layers and heads, `[layers, heads, pages, *page_shape]`."""
        planes: NDArray[Any] = self._array[layers.start : layers.stop, heads.start : heads.stop]
        return planes

    def commit_pages(self, first: int, last: int) -> None:
        """Have the memory of pages `first..last-1` of every plane ready; does nothing on a kernel that cannot."""
        with contextlib.suppress(OSError):
            for plane in range(self._layers * self._heads):
                base = plane * self._plane_nbytes
                start = (base + first * self._page_nbytes) // PAGE_BYTES * PAGE_BYTES
                self._map.madvise(_MADV_POPULATE_WRITE, start, base + last * self._page_nbytes - start)

    def release_pages(self, first: int, last: int) -> None:
        """Give the memory of pages `first..last-1` of every plane back to the system."""
        for plane in range(self._layers * self._heads):
            base = plane * self._plane_nbytes
            self._discard(base + first * self._page_nbytes, base + last * self._page_nbytes)

    def release_planes(self, layers: Iterable[int], heads: Iterable[int]) -> None:
        """Give whole planes back to the system."""
        heads = list(heads)
        for layer in layers:
            for head in heads:
                base = (layer * self._heads + head) * self._plane_nbytes
                self._discard(base, base + self._plane_nbytes)

    def _discard(self, start: int, end: int) -> None:
        """Drop whole memory pages inside [start, end): what shares one with a neighbour stays."""
        start = -(-start // PAGE_BYTES) * PAGE_BYTES
        end = end // PAGE_BYTES * PAGE_BYTES
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


class DevicePlanes:
    """Planes in GPU memory, one tensor per layer. Not run on a GPU yet.

    Releasing pages frees nothing here (that needs the driver's virtual memory calls); releasing all heads of a layer
    frees its tensor.
    """

    def __init__(
        self, layers: int, heads: int, pages: int, page_shape: tuple[int, ...], dtype: torch.dtype, device: str
    ) -> None:
        self._heads = heads
        self._tensors: list[torch.Tensor | None] = [
            torch.zeros((heads, pages, *page_shape), dtype=dtype, device=device) for _ in range(layers)
        ]

    def layer(self, layer: int) -> torch.Tensor:
        """The planes of one layer, `[heads, pages, *page_shape]`."""
        tensor = self._tensors[layer]
        if tensor is None:
            raise AssertionError(f"layer {layer} was released")
        return tensor

    def layers(self, layers: range, heads: range) -> list[torch.Tensor]:
        """The planes of adjacent layers and heads, a tensor `[heads, pages, *page_shape]` for each layer."""
        return [self.layer(layer)[heads.start : heads.stop] for layer in layers]

    def commit_pages(self, first: int, last: int) -> None:
        """Nothing to do: the tensors are there."""

    def release_pages(self, first: int, last: int) -> None:
        """Keep the memory: a tensor cannot give back a range."""

    def release_planes(self, layers: Iterable[int], heads: Iterable[int]) -> None:
        """Free the tensors of layers whose heads are all released."""
        if len(set(heads)) == self._heads:
            for layer in layers:
                self._tensors[layer] = None
