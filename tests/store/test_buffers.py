import ctypes
import mmap
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.store.buffers import Buffer, BufferPool, BuffersClosed, size_class
from headrace.store.layout import ALIGNMENT

MIB = 1 << 20


def address(buffer: Buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer.view))


@given(st.integers(1, 1 << 34))
def test_size_classes_are_aligned_few_and_waste_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size % ALIGNMENT == 0
    assert size_class(size) == size
    assert nbytes <= size <= max(1.25 * nbytes, nbytes + ALIGNMENT)


def test_buffers_are_aligned_of_the_asked_length_and_reused() -> None:
    pool = BufferPool(4 * MIB)
    with pool.acquire(393_216) as one, pool.acquire(5000) as two:
        assert address(one) % ALIGNMENT == 0
        assert address(two) % ALIGNMENT == 0
        assert (len(one.view), len(two.view)) == (393_216, 5000)
        assert pool.in_use == 2
        first = address(one)
        one.view[:3] = b"abc"
    assert pool.in_use == 0
    with pool.acquire(393_000) as again:
        assert address(again) == first
    assert pool.mapped_bytes == 393_216 + 8192


def test_a_buffer_is_released_exactly_once() -> None:
    pool = BufferPool(MIB)
    buffer = pool.acquire(4096)
    view = buffer.view
    buffer.release()
    with pytest.raises(RuntimeError, match="twice"):
        buffer.release()
    with pytest.raises(RuntimeError, match="after"):
        _ = buffer.view
    with pytest.raises(ValueError, match="released"):
        view[0] = 1
    assert pool.in_use == 0


def test_memory_that_an_array_still_shows_is_not_handed_out_again() -> None:
    pool = BufferPool(MIB)
    buffer = pool.acquire(4096)
    array = np.frombuffer(buffer.view, np.uint8)
    array[:] = 7
    buffer.release()
    with pool.acquire(4096) as other:
        other.view[:] = bytes(4096)
        assert (array == 7).all()
    assert pool.mapped_bytes == 4096


def test_other_sizes_make_room_and_impossible_ones_are_refused() -> None:
    pool = BufferPool(MIB)
    held = [pool.acquire(MIB // 4) for _ in range(4)]
    assert pool.try_acquire(4096) is None
    for buffer in held:
        buffer.release()
    with pool.acquire(MIB):
        assert pool.mapped_bytes == MIB
    for nbytes in (0, -1, MIB + 1):
        with pytest.raises(ValueError, match="does not fit"):
            pool.acquire(nbytes)
    assert pool.in_use == 0


def test_waiters_are_served_in_turn_so_that_small_ones_do_not_starve_a_large_one() -> None:
    pool = BufferPool(4 * 4096)
    held = [pool.acquire(4096) for _ in range(4)]
    served: list[str] = []
    threads = []
    for number, (name, nbytes) in enumerate((("large", 3 * 4096), ("small", 4096), ("tiny", 1))):

        def take(name: str = name, nbytes: int = nbytes) -> None:
            with pool.acquire(nbytes):
                served.append(name)

        threads.append(threading.Thread(target=take))
        threads[-1].start()
        while len(pool._waiting) <= number:
            os.sched_yield()
    held.pop().release()
    assert pool.try_acquire(1) is None  # there is room, but others wait
    assert served == []
    for buffer in held:
        buffer.release()
    for thread in threads:
        thread.join()
    assert served[0] == "large"
    assert sorted(served) == ["large", "small", "tiny"]
    assert pool.in_use == 0


def test_waiting_ends_in_time_or_when_the_pool_closes() -> None:
    pool = BufferPool(4096)
    held = pool.acquire(1)
    with pytest.raises(TimeoutError):
        pool.acquire(1, timeout=0.01)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            pool.acquire(1)
        except BuffersClosed as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not pool._waiting:
        os.sched_yield()
    pool.close()
    thread.join()
    assert len(caught) == 1
    with pytest.raises(BuffersClosed):
        pool.try_acquire(1)
    held.release()
    assert (pool.in_use, pool.mapped_bytes) == (0, 0)


def test_many_threads_never_share_memory_nor_exceed_the_limit() -> None:
    pool = BufferPool(16 * 4096)
    wrong: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(200):
            with pool.acquire(int(rng.integers(1, 6 * 4096))) as buffer:
                pattern = bytes([number]) * len(buffer.view)
                buffer.view[:] = pattern
                if pool.mapped_bytes > pool.limit:
                    wrong.append("limit")
                os.sched_yield()
                if buffer.view != pattern:
                    wrong.append("shared")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.in_use == 0


def test_all_memory_is_pinned_while_it_is_mapped() -> None:
    pinned: dict[int, int] = {}

    class Pinning:
        def pin(self, memory: mmap.mmap) -> None:
            assert id(memory) not in pinned
            pinned[id(memory)] = len(memory)

        def unpin(self, memory: mmap.mmap) -> None:
            assert pinned.pop(id(memory)) == len(memory), "and it is still mapped"

    pool = BufferPool(4 * MIB)
    pool.pin(Pinning(), MIB)
    assert list(pinned.values()) == [MIB] * 4
    with pool.acquire(MIB), pool.acquire(2 * MIB):
        assert sum(pinned.values()) == pool.mapped_bytes
    assert sum(pinned.values()) == pool.mapped_bytes  # kept for the next one
    with pool.acquire(4 * MIB):
        assert list(pinned.values()) == [4 * MIB]
        pool.close()
        assert len(pinned) == 1
    assert not pinned
