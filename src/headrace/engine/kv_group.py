"""A KV group: a layer range x a kv-head range with its own pages and planes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from headrace.core.errors import ConfigError
from headrace.engine.pages import PageAllocator
from headrace.engine.planes import DevicePlanes, HostPlanes, Planes
from headrace.engine.prefix_index import PrefixIndex
from headrace.engine.sequence import Sequence
from headrace.kernels.attention import AttentionBackend, LayerPlanes

RESERVE_FACTOR = 4


@dataclass(frozen=True)
class KVShape:
    """What one token's KV looks like in a group.

    Attributes:
        layers: model layers of the group.
        heads: kv heads of the group.
        head_dim: elements of a key or a value.
        page_size: tokens per page.
        dtype: type of stored elements.
        padding: elements per token and head that the backend's page layout adds.
    """

    layers: range
    heads: range
    head_dim: int
    page_size: int
    dtype: str
    padding: int = 0

    @classmethod
    def stored_by(
        cls, backend: AttentionBackend, layers: range, heads: range, head_dim: int, page_size: int, dtype: str
    ) -> "KVShape":
        """The shape of planes that a backend lays out.

        Raises:
            ConfigError: the backend has no such page size.
        """
        k_page, v_page = backend.k_page_shape(page_size, head_dim), backend.v_page_shape(page_size, head_dim)
        stored = (k_page[0] * k_page[1] + v_page[0] * v_page[1]) // page_size
        return cls(layers, heads, head_dim, page_size, dtype, stored - 2 * head_dim)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, padding included."""
        return len(self.layers) * len(self.heads) * (2 * self.head_dim + self.padding) * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page over all planes."""
        return self.token_bytes * self.page_size

    def pages_in(self, nbytes: int) -> int:
        """Whole pages that fit in so many bytes."""
        return nbytes // self.page_bytes


class KVGroup:
    """Pages and planes of a layer range x a kv-head range, growing and shrinking live.

    A local engine has one group over all layers and heads. A span guest or a head helper adds one; a home that gave
    layers or heads away releases planes and grows pages.

    Args:
        shape: layers, heads, sizes.
        pages: pages to begin with.
        backend: decides the order inside a page and the kind of array.
        device: `cpu` or a CUDA device.
        reserve: pages the group may grow to; default: on CPU as many as the machine's memory holds, at most four times;
            on a device `pages`, since its planes are allocated at once.
    """

    def __init__(
        self, shape: KVShape, pages: int, backend: AttentionBackend, device: str = "cpu", reserve: int | None = None
    ) -> None:
        if reserve is None:
            reserve = pages
            if not isinstance(backend.plane_dtype(shape.dtype), torch.dtype):
                reserve = max(pages, min(RESERVE_FACTOR * pages, shape.pages_in(psutil.virtual_memory().total)))
        self.shape = shape
        self.reserve = reserve
        self.index = PrefixIndex()
        self.allocator = PageAllocator(pages, self.index)
        self._backend = backend
        layers, heads = len(shape.layers), len(shape.heads)
        k_page = backend.k_page_shape(shape.page_size, shape.head_dim)
        v_page = backend.v_page_shape(shape.page_size, shape.head_dim)
        dtype = backend.plane_dtype(shape.dtype)
        self._k: Planes
        self._v: Planes
        #: In device planes: the page where rows that pad a step of fixed shape write. No sequence ever has it.
        self.scratch_page: int | None = None
        if isinstance(dtype, torch.dtype):
            self.scratch_page = reserve
            self._k = DevicePlanes(layers, heads, reserve + 1, k_page, dtype, device)
            self._v = DevicePlanes(layers, heads, reserve + 1, v_page, dtype, device)
        else:
            self._k = HostPlanes(layers, heads, reserve, k_page, dtype)
            self._v = HostPlanes(layers, heads, reserve, v_page, dtype)
        self._views = {layer: (self._k.layer(i), self._v.layer(i)) for i, layer in enumerate(shape.layers)}

    @property
    def pages(self) -> int:
        """Pages of the group now."""
        return self.allocator.total

    @property
    def nbytes(self) -> int:
        """Bytes the pages take when all are written."""
        return self.pages * self.shape.page_bytes

    def planes(self, layer: int) -> tuple[Any, Any]:
        """K and V planes of a model layer, `[heads, pages, *page_shape]` each, zero copy."""
        return self._views[layer]

    def span(self, layers: range, heads: range) -> tuple[LayerPlanes, LayerPlanes]:
        """K and V planes of adjacent model layers and kv heads of the group, none of them released; zero copy."""
        first_layer, first_head = self.shape.layers.start, self.shape.heads.start
        own_layers = range(layers.start - first_layer, layers.stop - first_layer)
        own_heads = range(heads.start - first_head, heads.stop - first_head)
        return self._k.layers(own_layers, own_heads), self._v.layers(own_layers, own_heads)

    def commit(self, nbytes: int) -> None:
        """Have the memory of the pages that are given out first ready, about so many bytes of it.

        A page of memory that is written first in a step, or by a load, costs a fault there, which for a long prompt's
        KV adds up to as much processor time as reading it from a disk.
        """
        pages = min(self.pages, nbytes // self.shape.page_bytes)
        self._k.commit_pages(0, pages)
        self._v.commit_pages(0, pages)

    def resize(self, pages: int, sequences: Iterable[Sequence]) -> None:
        """Grow or shrink to a number of pages; no plan may be in flight.

        Shrinking moves held pages below the new end (their KV is copied, the sequences' page lists are updated) and
        gives the memory above it back.

        Raises:
            ConfigError: more than the reserved address space, or less than one page.
            OutOfPages: sequences hold more pages than would remain; nothing is changed.
        """
        if not 1 <= pages <= self.reserve:
            raise ConfigError(f"a KV group can have 1 to {self.reserve} pages, not {pages}")
        old = self.pages
        if pages >= old:
            self.allocator.grow(pages)
            return
        moves = self.allocator.shrink(pages)
        if moves:
            self.copy(moves)
            target_of = dict(moves)
            for seq in sequences:
                seq.pages[:] = [target_of.get(page, page) for page in seq.pages]
        self._k.release_pages(pages, old)
        self._v.release_pages(pages, old)

    def copy(self, moves: Iterable[tuple[int, int]]) -> None:
        """Copy pages `(source, target)` on all planes; targets are distinct, all sources are read first."""
        sources, targets = np.array(list(moves), np.int64).T
        for k, v in self._views.values():
            self._backend.copy_pages(k, v, sources, targets)

    def release_layers(self, layers: range) -> None:
        """Give the planes of some layers back: they moved to another worker."""
        local = [layer - self.shape.layers.start for layer in layers]
        for layer in layers:
            del self._views[layer]
        self._k.release_planes(local, range(len(self.shape.heads)))
        self._v.release_planes(local, range(len(self.shape.heads)))
