"""Sums that the store's own code takes are those of xxhash; a unit is claimed once."""

import threading

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.store.native import library
from headrace.store.native.fields import CLAIMED, LATE
from headrace.store.native.library import Job, claim, copy_rows


class Flag:
    def __init__(self) -> None:
        self.word = np.zeros(1, np.int64)
        self.address: int = self.word.__array_interface__["data"][0]


def settle(data: bytearray, sums: list[int]) -> int:
    flag = Flag()
    job = Job(memoryview(data), flag.address, None)
    job.expect(sums)
    answer = job.settle()
    assert job.answer == answer
    assert flag.word[0] == (answer == CLAIMED)
    return answer


def sums_of(data: bytearray, count: int) -> list[int]:
    size = len(data) // count
    return [xxhash.xxh3_64_intdigest(data[number * size : (number + 1) * size]) for number in range(count)]


LENGTHS = [*range(241, 400), 511, 512, 513, *range(1020, 1030), *range(1085, 1095), 2047, 2048, 2049]


@pytest.mark.parametrize("sizes", [LENGTHS, range(4096, 65537, 4096), [196608, 393216, 100001]])
def test_sums_of_all_lengths_are_those_of_xxhash(sizes: list[int]) -> None:
    rng = np.random.default_rng(1)
    for size in sizes:
        data = bytearray(rng.bytes(size))
        assert settle(data, sums_of(data, 1)) == CLAIMED, size


@given(st.integers(241, 6000), st.integers(1, 6), st.integers(0, 1 << 30), st.integers(0, 1 << 40))
def test_the_first_wrong_record_is_found(size: int, count: int, seed: int, place: int) -> None:
    data = bytearray(np.random.default_rng(seed).bytes(size * count))
    wanted = sums_of(data, count)
    assert settle(data, wanted) == CLAIMED
    bit = place % (8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    data[-1] ^= 128  # the last is wrong as well, or, where it is the same bit, right again
    wrong = [number for number, total in enumerate(sums_of(data, count)) if total != wanted[number]]
    assert settle(data, wanted) == (wrong[0] if wrong else CLAIMED)


def test_extreme_content_has_the_same_sums() -> None:
    for byte in (0, 255, 128):
        data = bytearray([byte]) * 8192
        assert settle(data, sums_of(data, 2)) == CLAIMED


def test_of_many_who_settle_a_unit_one_copies_it() -> None:
    data = bytearray(np.random.default_rng(1).bytes(4 * 4096))
    for _ in range(50):
        flag = Flag()
        targets = [bytearray(4 * 4000) for _ in range(4)]
        answers: list[int] = []
        together = threading.Barrier(4)

        def work(target: bytearray, flag=flag, answers=answers, together=together) -> None:  # type: ignore[no-untyped-def]
            job = Job(memoryview(data), flag.address, copy_rows(memoryview(data), memoryview(target), 4000, 4))
            job.expect(sums_of(data, 4))
            together.wait()
            answers.append(job.settle())

        threads = [threading.Thread(target=work, args=(target,)) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [CLAIMED, LATE, LATE, LATE]
        wanted = b"".join(data[at : at + 4000] for at in range(0, len(data), 4096))
        assert sorted(targets) == [bytes(len(wanted))] * 3 + [wanted]
        assert not claim(flag.address)


def test_what_is_wrong_or_claimed_is_not_copied() -> None:
    data, target, flag = bytearray(b"x" * 4096), bytearray(4096), Flag()
    job = Job(memoryview(data), flag.address, copy_rows(memoryview(data), memoryview(target), 4096, 1))
    job.expect([1])
    assert job.settle() == 0
    assert claim(flag.address)
    job.expect(sums_of(data, 1))
    assert job.settle() == LATE
    assert target == bytes(4096)


def test_threads_that_come_first_share_one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_made", None)
    together = threading.Barrier(4)
    found: list[object] = []

    def work() -> None:
        together.wait()
        found.append(library._library())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
