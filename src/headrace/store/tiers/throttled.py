"""A tier made slow on purpose: one device whose bandwidth the requests in flight share."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

from headrace.store.part import PartId
from headrace.store.tiers.rates import Rate, as_rate
from headrace.store.tiers.tier import PartWriter, Scanned, Scope, Tier

Bandwidth = float | Callable[[float], float] | Rate
_DEPTH = 4


class Clock(Protocol):
    """Time, and waiting for it."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def wait_until(self, due: float) -> None:
        """Return at `due`, or when the clock is stopped."""
        ...

    def stop(self) -> None:
        """Wake everybody; nobody waits any more."""
        ...


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def now(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def wait_until(self, due: float) -> None:
        """See `Clock`."""
        left = due - time.monotonic()
        if left > 0:
            self._stopped.wait(left)

    def stop(self) -> None:
        """See `Clock`."""
        self._stopped.set()


class _Device:
    """Serves requests one behind the other, each at the full rate; together they get the bandwidth, no more."""

    def __init__(self, bandwidth: Bandwidth) -> None:
        self.rate = as_rate(bandwidth)
        self._free_at = 0.0
        self._lock = threading.Lock()

    def book(self, arrived: float, nbytes: int) -> float:
        """When a request is served."""
        with self._lock:
            self._free_at = self.rate.finish(max(arrived, self._free_at), nbytes)
            return self._free_at


class ThrottledTier:
    """A `Tier` with a set bandwidth and latency.

    A request does what it does at once, and returns when a device of this bandwidth would have finished it: the
    device serves one request after the other, idle time is lost, and the latency comes on top, for all in flight at
    the same time. What fails takes no bandwidth.

    Args:
        inner: the tier behind; it must be faster.
        bandwidth: bytes per second, or a function of the seconds since now, see `rates`.
        latency: seconds that each request takes in addition.
        depth: reads in flight that keep it busy; by default 4, or more if the inner tier has more.
        write_bandwidth: of writes, if they are served apart; by default reads and writes share the device.
        clock: in place of real time.
    """

    def __init__(
        self,
        inner: Tier,
        bandwidth: Bandwidth,
        latency: float = 0.0,
        depth: int | None = None,
        write_bandwidth: Bandwidth | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.capacity = inner.capacity
        self.scope: Scope = inner.scope
        self.depth = depth or max(_DEPTH, inner.depth)
        self._latency = latency
        self._clock = clock or WallClock()
        self._started = self._clock.now()
        self._reads = _Device(bandwidth)
        self._writes = self._reads if write_bandwidth is None else _Device(write_bandwidth)

    @property
    def folder(self) -> Path | None:
        """The inner tier's private folder, if it has one."""
        return getattr(self.inner, "folder", None)

    def capacity_between(self, start: float, end: float) -> float:
        """Bytes that can be read between two times of the clock (`time.monotonic` by default)."""
        return self._reads.rate.bytes_between(start - self._started, end - self._started)

    def read(self, part: PartId, offset: int, into: memoryview) -> None:
        """See `Tier.read`."""
        arrived = self._clock.now()
        self.inner.read(part, offset, into)
        self._serve(self._reads, arrived, len(into))

    def create(self, part: PartId, nbytes: int) -> "ThrottledWriter":
        """See `Tier.create`."""
        return ThrottledWriter(self, self.inner.create(part, nbytes))

    def delete(self, part: PartId) -> None:
        """See `Tier.delete`."""
        self.inner.delete(part)

    def scan(self) -> Iterator[Scanned]:
        """See `Tier.scan`."""
        return self.inner.scan()

    def close(self) -> None:
        """See `Tier.close`; requests in flight return at once."""
        self._clock.stop()
        self.inner.close()

    def write(self, writer: PartWriter, offset: int, data: memoryview) -> None:
        """Put something at the pace of writes."""
        arrived = self._clock.now()
        writer.put(offset, data)
        self._serve(self._writes, arrived, len(data))

    def _serve(self, device: _Device, arrived: float, nbytes: int) -> None:
        due = device.book(arrived - self._started, nbytes)
        self._clock.wait_until(self._started + due + self._latency)


class ThrottledWriter:
    """A part being written to a throttled tier."""

    def __init__(self, tier: ThrottledTier, inner: PartWriter) -> None:
        self._tier = tier
        self._inner = inner

    def put(self, offset: int, data: memoryview) -> None:
        """See `PartWriter.put`."""
        self._tier.write(self._inner, offset, data)

    def seal(self) -> None:
        """See `PartWriter.seal`."""
        self._inner.seal()

    def abort(self) -> None:
        """See `PartWriter.abort`."""
        self._inner.abort()

    def __enter__(self) -> "ThrottledWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
