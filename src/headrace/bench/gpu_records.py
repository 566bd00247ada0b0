"""Whether KV that moves on streams of its own waits for what it must, on a GPU: a slow kernel before each move."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headrace.kernels.attention import backend_for
from headrace.kernels.device_streams import HostPinning
from headrace.store.buffers import BufferPool, size_class

_HEADS, _PAGES, _PAGE_SIZE, _DIM = 8, 64, 16, 128
_TOKENS = _PAGES * _PAGE_SIZE
_STALL_CYCLES = 200_000_000  # about a tenth of a second
_OLD, _NEW = 7.0, 9.0


def check(device: str) -> dict[str, Any]:
    """Save pages that are written behind a slow kernel, and load into pages that are read behind one.

    Args:
        device: `cuda`; `cpu` for tests of this check.

    Returns:
        `save_holds`, `load_holds`; `pinned`: the records lay in pinned memory.
    """
    backend = backend_for(device, name="torch" if device == "cpu" else "auto")
    planes = [torch.zeros(_HEADS, _PAGES, _PAGE_SIZE, _DIM, dtype=torch.float16, device=device) for _ in range(2)]
    pages = np.random.default_rng(0).permutation(_PAGES).astype(np.int64)
    nbytes = 2 * planes[0].nbytes
    pool = BufferPool(size_class(nbytes))
    if device != "cpu":
        pool.pin(HostPinning(device), nbytes)
    with pool.acquire(nbytes) as buffer:
        record = torch.from_numpy(np.frombuffer(buffer.view, np.uint8)).view(torch.float16)
        pinned = device != "cpu" and record.is_pinned()
        _stall(device)
        for plane in planes:
            plane.fill_(_OLD)
        backend.kv_written()
        _elsewhere(lambda: backend.save_record(planes[0], planes[1], pages, _TOKENS, buffer.view))
        saved = bool((record == _OLD).all())
        record.fill_(_NEW)
        _stall(device)
        kept = [plane.clone() for plane in planes]
        backend.pages_free()
        _elsewhere(lambda: backend.load_records([planes[0]], [planes[1]], pages, 0, _TOKENS, buffer.view, _HEADS))
        loaded = all(bool((plane == _NEW).all()) for plane in planes)
        loaded &= all(bool((plane == _OLD).all()) for plane in kept)
        del record
    pool.close()
    return {"save_holds": saved, "load_holds": loaded, "pinned": pinned}


def _stall(device: str) -> None:
    if device != "cpu":
        torch.cuda._sleep(_STALL_CYCLES)


def _elsewhere(move: Callable[[], None]) -> None:
    """Call in a thread of its own, as the store does; what it raises is raised here."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            move()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
