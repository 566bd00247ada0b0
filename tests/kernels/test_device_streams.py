"""Streams of stored KV beside the computing, with a driver that writes down what it is told."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paged_batch import empty_planes

from headrace.kernels.device_streams import CudaRecordStreams, HostPinning
from headrace.kernels.torch_attention import TorchAttention


class Driver:
    """Stands for `torch.cuda`: streams and events by number, and all calls in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.streams = 0
        self.refused = 0
        driver = self

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                self.blocking = blocking

            def synchronize(self) -> None:
                driver.calls.append(("over", self.blocking))

            def record(self, stream: "Stream") -> None:
                driver.calls.append(("record", id(self), stream.number))

        class Stream:
            def __init__(
                self, device: torch.device | None = None, priority: int = 0, number: int | None = None
            ) -> None:
                driver.streams += number is None
                self.number = driver.streams if number is None else number

            def wait_event(self, event: Event) -> None:
                driver.calls.append(("wait", id(event), self.number))

        @contextmanager
        def within(stream: Stream) -> Iterator[None]:
            driver.calls.append(("begin", stream.number))
            yield
            driver.calls.append(("end", stream.number))

        main = Stream(number=0)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", within)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
        runtime = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes))
        return self.refused

    def _unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_a_load_waits_for_its_pages_and_a_save_for_its_kv(driver: Driver) -> None:
    streams = CudaRecordStreams("cuda")
    streams.pages_free()
    streams.kv_written()
    (_, free, _), (_, written, _) = driver.calls
    assert free != written
    for event, moving in ((free, streams.loading), (written, streams.saving)):
        driver.calls.clear()
        with moving():
            driver.calls.append(("copies",))
        *before, (record, _, stream), over = driver.calls
        assert before == [("wait", event, 1), ("begin", 1), ("copies",), ("end", 1)]
        assert (record, stream) == ("record", 1)
        assert over == ("over", True)


def test_records_are_let_go_only_when_copies_are_over_also_after_an_error(driver: Driver) -> None:
    streams = CudaRecordStreams("cuda")
    with pytest.raises(ValueError, match="no such page"), streams.loading():
        raise ValueError("no such page")
    assert [call[0] for call in driver.calls] == ["wait", "begin", "record", "over"]


def test_every_thread_has_a_stream_of_its_own(driver: Driver) -> None:
    streams = CudaRecordStreams("cuda")

    def work() -> None:
        for _ in range(3):
            with streams.loading(), streams.saving():
                pass

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert driver.streams == 2
    assert {call[1] for call in driver.calls if call[0] == "begin"} == {1, 2}


class Watched:
    """Streams that look at the pages, or the record, when moving begins and when it is over."""

    def __init__(self, planes: torch.Tensor, record: bytearray) -> None:
        self.planes, self.record = planes, record
        self.seen: list[tuple[str, bool, bool]] = []
        self.marks: list[str] = []

    def pages_free(self) -> None:
        self.marks.append("free")

    def kv_written(self) -> None:
        self.marks.append("written")

    def loading(self) -> Any:
        return self._watch("load")

    def saving(self) -> Any:
        return self._watch("save")

    @contextmanager
    def _watch(self, what: str) -> Iterator[None]:
        def state() -> bool:
            return not bool(self.planes.isnan().all()) if what == "load" else any(self.record)

        before = state()
        yield
        self.seen.append((what, before, state()))


def test_all_that_is_moved_moves_on_the_streams() -> None:
    plain = TorchAttention("cpu")
    planes = empty_planes(plain, 2, 4, 16, 32, "float32")
    record = bytearray(2 * 2 * 32 * 32 * 4)
    streams = Watched(planes[0], record)
    backend = TorchAttention("cpu", streams)
    new = np.random.default_rng(0).standard_normal(2 * 2 * 32 * 32).astype(np.float32)
    k, v = ([plane] for plane in planes)
    backend.load_records(k, v, np.array([2, 0]), 0, 32, memoryview(bytearray(new.tobytes())), 2)  # type: ignore[arg-type]
    backend.save_record(*planes, np.array([2, 0]), 32, memoryview(record))
    assert streams.seen == [("load", False, True), ("save", False, True)]
    assert bytes(record) == new.tobytes()
    backend.pages_free()
    backend.kv_written()
    assert streams.marks == ["free", "written"]


def test_memory_is_pinned_where_it_is(
    driver: Driver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostPinning, "_drain", lambda self: driver.calls.append(("drain",)))
    pinning, memory, *others = HostPinning("cuda"), *(mmap.mmap(-1, size) for size in (8192, 4096, 4096))
    pinning.pin(memory)
    driver.refused = 2
    for other in others:
        pinning.pin(other)
    assert caplog.text.count("cannot be pinned (CUDA error 2)") == 1
    for each in (memory, *others):
        pinning.unpin(each)
        each.close()  # nothing of the pinning looks at it any more
    (_, address, nbytes), *_ = driver.calls
    assert nbytes == 8192
    assert [call[0] for call in driver.calls] == ["register", "register", "drain", "unregister"], (
        "one refusal is enough"
    )
    assert driver.calls[-1] == ("unregister", address)
