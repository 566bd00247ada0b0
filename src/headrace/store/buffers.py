"""Aligned memory for reads and writes: bounded, reused, and owned by exactly one holder at a time."""

import mmap
import threading
import time
from collections import deque
from types import TracebackType
from typing import Protocol

from headrace.core.errors import HeadraceError
from headrace.core.settings import format_size
from headrace.store.layout import aligned


class BuffersClosed(HeadraceError):
    """The pool was closed: no more buffers."""


class Pinning(Protocol):
    """Has a device know memory, so that copies between the two run beside its computing."""

    def pin(self, memory: mmap.mmap) -> None:
        """Memory was mapped; what cannot be pinned stays as it is."""
        ...

    def unpin(self, memory: mmap.mmap) -> None:
        """Memory is about to go."""
        ...


class Buffer:
    """Aligned memory that belongs to its holder until `release`, which is called exactly once.

    A context manager that releases. Slices and arrays made of `view` must not outlive it.
    """

    __slots__ = ("_memory", "_pool", "_view")

    def __init__(self, pool: "BufferPool", memory: mmap.mmap, nbytes: int) -> None:
        self._pool = pool
        self._memory = memory
        self._view: memoryview | None = memoryview(memory)[:nbytes]

    @property
    def view(self) -> memoryview:
        """The memory, as many bytes as were asked for.

        Raises:
            RuntimeError: it was released.
        """
        if self._view is None:
            raise RuntimeError("buffer used after its release")
        return self._view

    def release(self) -> None:
        """Give it back.

        Raises:
            RuntimeError: it was given back before.
        """
        self._pool._give_back(self)

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class BufferPool:
    """Buffers of any size whose memory together stays under a limit; whoever asks for more waits, first come first.

    Memory is mapped on page borders (so that O_DIRECT works), in classes of four sizes per power of two (at most a
    fifth is wasted), and kept for the next buffer of its class; it is unmapped when another class needs the room.

    Args:
        limit: bytes of all buffers together, those waiting for reuse included.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._mapped = 0
        self._in_use = 0
        self._free: dict[int, list[mmap.mmap]] = {}
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pinning: Pinning | None = None

    def pin(self, pinning: Pinning, nbytes: int) -> None:
        """Have all memory pinned; before the first buffer. Pinning takes long: it is done now, for buffers of a size.

        Args:
            pinning: does it.
            nbytes: size of a buffer; as many are mapped as have room.
        """
        self._pinning = pinning
        held = []
        while (buffer := self.try_acquire(nbytes)) is not None:
            held.append(buffer)
        for buffer in held:
            buffer.release()

    @property
    def limit(self) -> int:
        """Bytes that all buffers together may take."""
        return self._limit

    @property
    def in_use(self) -> int:
        """Buffers that somebody holds: 0 when nothing is leaked."""
        return self._in_use

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory taken, in use or kept for reuse."""
        return self._mapped

    def acquire(self, nbytes: int, timeout: float | None = None) -> Buffer:
        """A buffer; waits until there is room.

        Args:
            nbytes: its size.
            timeout: seconds to wait at most; None: for ever.

        Raises:
            ValueError: it can never be had: not positive, or beyond the limit.
            TimeoutError: there was no room in time.
            BuffersClosed: the pool is closed.
        """
        size = self._size(nbytes)
        deadline = None if timeout is None else time.monotonic() + timeout
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while True:
                    if self._waiting[0] is ticket and (memory := self._take(size)) is not None:
                        return Buffer(self, memory, nbytes)
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError(f"no room for a buffer of {nbytes} bytes within {timeout:g} s")
                    self._changed.wait(left)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def try_acquire(self, nbytes: int) -> Buffer | None:
        """A buffer if there is room now and nobody waits for it.

        Raises:
            ValueError: it can never be had.
            BuffersClosed: the pool is closed.
        """
        size = self._size(nbytes)
        with self._changed:
            memory = None if self._waiting else self._take(size)
        return None if memory is None else Buffer(self, memory, nbytes)

    def close(self) -> None:
        """Unmap what is free, refuse what comes; buffers in use are unmapped as they are released. Idempotent."""
        with self._changed:
            self._closed = True
            self._trim(self._limit)
            self._changed.notify_all()

    def _size(self, nbytes: int) -> int:
        size = size_class(nbytes)
        if nbytes < 1 or size > self._limit:
            raise ValueError(f"a buffer of {nbytes} bytes does not fit a pool of {format_size(self._limit)}")
        return size

    def _take(self, size: int) -> mmap.mmap | None:
        if self._closed:
            raise BuffersClosed("the buffer pool is closed")
        kept = self._free.get(size)
        if kept:
            self._in_use += 1
            return kept.pop()
        if self._mapped + size > self._limit:
            self._trim(self._mapped + size - self._limit)
        if self._mapped + size > self._limit:
            return None
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):
            # A fork while a direct read is under way would make the page copy-on-write, and the read could go astray.
            memory.madvise(mmap.MADV_DONTFORK)
        if self._pinning is not None:
            self._pinning.pin(memory)
        self._mapped += size
        self._in_use += 1
        return memory

    def _trim(self, nbytes: int) -> None:
        for size, kept in self._free.items():
            while kept and nbytes > 0:
                memory = kept.pop()
                if self._pinning is not None:
                    self._pinning.unpin(memory)
                memory.close()
                self._mapped -= size
                nbytes -= size

    def _give_back(self, buffer: Buffer) -> None:
        with self._changed:
            view, buffer._view = buffer._view, None
            if view is None:
                raise RuntimeError("buffer released twice")
            memory = buffer._memory
            self._in_use -= 1
            try:
                view.release()
                memory.resize(len(memory))  # changes nothing; refused while anything still looks at the memory
            except BufferError:
                # A slice or array is alive against the rules. The memory must not change under it, so it is not used
                # again; it goes with the array.
                self._mapped -= len(memory)
                if self._pinning is not None:
                    self._pinning.unpin(memory)
            else:
                self._free.setdefault(len(memory), []).append(memory)
                if self._closed:
                    self._trim(self._limit)
            self._changed.notify_all()


def size_class(nbytes: int) -> int:
    """Bytes mapped for a buffer: the next of four sizes per power of two, a multiple of the alignment."""
    step = 1 << max(0, (nbytes - 1).bit_length() - 3)
    return aligned(-(-nbytes // step) * step)
