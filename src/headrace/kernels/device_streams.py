"""Stored KV moves to and from a GPU beside its computing: on streams of the threads that move it, from pinned memory.

The step loop's stream is not waited for but where it has to be: a load begins behind the kernels that may still use
its pages, a save behind those that write them. Who moves KV returns when it has moved; so a layer that has come, by the
word of the thread that brought it, is there for every kernel launched afterwards. Not run on a GPU yet.
"""

import contextlib
import logging
import mmap
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class RecordStreams(Protocol):
    """Where records are moved, and behind what."""

    def pages_free(self) -> None:
        """In the step loop: what was launched so far comes before all loads that move from now on."""
        ...

    def kv_written(self) -> None:
        """In the step loop: what was launched so far comes before all saves that move from now on."""
        ...

    def loading(self) -> AbstractContextManager[None]:
        """What the thread launches inside moves records into pages; it is over at the end."""
        ...

    def saving(self) -> AbstractContextManager[None]:
        """What the thread launches inside moves pages into records; it is over at the end."""
        ...


class CudaRecordStreams:
    """A stream for each thread that moves records, of high priority: its kernels are small, and are waited for.

    Args:
        device: `cuda` or `cuda:N`.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._own = threading.local()
        self._free, self._written = torch.cuda.Event(), torch.cuda.Event()

    def pages_free(self) -> None:
        """See `RecordStreams.pages_free`."""
        self._free.record(torch.cuda.current_stream(self._device))

    def kv_written(self) -> None:
        """See `RecordStreams.kv_written`."""
        self._written.record(torch.cuda.current_stream(self._device))

    def loading(self) -> AbstractContextManager[None]:
        """See `RecordStreams.loading`."""
        return self._behind(self._free)

    def saving(self) -> AbstractContextManager[None]:
        """See `RecordStreams.saving`."""
        return self._behind(self._written)

    @contextmanager
    def _behind(self, event: torch.cuda.Event) -> Iterator[None]:
        own = self._own
        if not hasattr(own, "stream"):
            own.stream = torch.cuda.Stream(self._device, priority=-1)
            own.over = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps
        own.stream.wait_event(event)
        try:
            with torch.cuda.stream(own.stream):
                yield
        finally:
            own.over.record(own.stream)
            own.over.synchronize()  # the records are the caller's again


class HostPinning:
    """Keeps host memory where it is and tells the driver, so that copies run beside the computing. See `store.buffers`.

    Memory that cannot be pinned stays as it is, and no more is tried: copies from it are right, only slower.

    Args:
        device: `cuda` or `cuda:N`.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pinned: set[int] = set()
        self._refused = False

    def pin(self, memory: mmap.mmap) -> None:
        """Pin a mapping."""
        if self._refused:
            return
        address = _address(memory)
        with torch.cuda.device(self._device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), _PORTABLE))
        if not error:
            self._pinned.add(address)
            return
        self._refused = True
        log.warning("host memory cannot be pinned (CUDA error %d): stored KV will be copied more slowly", error)
        self._drain()

    def _drain(self) -> None:
        """Launch something: the next launch of a thread tells an error of the driver's once more."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)

    def unpin(self, memory: mmap.mmap) -> None:
        """Before the mapping goes; nothing when it was not pinned."""
        address = _address(memory)
        if address in self._pinned:
            self._pinned.discard(address)
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(address)


def _address(memory: mmap.mmap) -> int:
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address
