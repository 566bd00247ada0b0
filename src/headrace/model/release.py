"""Gives the memory of weights back once they are packed."""

import ctypes
import mmap
from collections import Counter

from torch import Tensor, nn

_DONTNEED = 4
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Weights:
    """Knows which weights of a model have a storage of their own, so that only those are given back.

    Safetensors maps each file as one piece, so the pages of a packed weight would stay resident until the last tensor
    of the file goes; they are dropped page by page instead.
    """

    def __init__(self, model: nn.Module) -> None:
        self._users: Counter[int] = Counter()
        self.add(model)

    def add(self, module: nn.Module) -> None:
        """Count the weights of `module` and its children."""
        for part in module.modules():
            self._users.update(weight.data_ptr() for weight in part._parameters.values() if weight is not None)

    def release(self, module: nn.Module) -> None:
        """Give back the weights of `module` (not of its children), which nobody may use any more. Shared ones stay."""
        for name, weight in list(module._parameters.items()):
            if weight is None:
                continue
            if self._users[weight.data_ptr()] == 1:
                _drop_pages(weight)
                module._parameters[name] = None
            else:
                self._users[weight.data_ptr()] -= 1


def _drop_pages(weight: Tensor) -> None:
    """Whole pages inside the weight only: its neighbours in the file or on the heap keep theirs."""
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.numel() * weight.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if weight.is_contiguous() and end > start:
        _madvise(start, end - start, _DONTNEED)
