"""Memory for weights in large pages: a page's translation is missed 512 times less often while weights stream by."""

import contextlib
import mmap
import threading

import torch
from torch import Tensor

_HUGE = 2 << 20
_BLOCK = 32 << 20
_LINE = 64


class WeightArena:
    """Hands out float32 tensors from blocks of memory that the kernel is asked to back with huge pages.

    A block lives as long as one of its tensors. Where huge pages are not to be had, it is ordinary memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: Tensor | None = None
        self._used = 0

    def floats(self, count: int) -> Tensor:
        """`count` float32 numbers, not initialised, aligned to a cache line."""
        need = -(-4 * count // _LINE) * _LINE // 4
        with self._lock, torch.inference_mode(False):  # an inference tensor could not be written to outside that mode
            if self._block is None or self._used + need > len(self._block):
                block = _map(4 * need)
                if 4 * need >= _BLOCK:  # a block of its own; the rest of the present one is still good
                    return block[:count]
                self._block, self._used = block, 0
            taken = self._block[self._used : self._used + count]
            self._used += need
            return taken


def _map(least: int) -> Tensor:
    """A new block of at least so many bytes, aligned to a huge page."""
    size = -(-max(least, _BLOCK) // _HUGE) * _HUGE
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    first = (-whole.data_ptr() % _HUGE) // 4
    return whole[first : first + size // 4]
