"""A tier that fails on purpose, by a plan that is the same in every run."""

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from types import TracebackType

from headrace.store.layout import ALIGNMENT
from headrace.store.part import PartId
from headrace.store.tiers.tier import PartMissing, PartWriter, Scanned, Scope, Tier, TierError, TierFull


class Fault(StrEnum):
    """What can go wrong; each kind counts the calls that it could strike on its own."""

    #: A read fails.
    READ_ERROR = "read-error"
    #: A read says that the part is not there.
    MISSING = "missing"
    #: A read fills half of the memory and then fails.
    SHORT_READ = "short-read"
    #: A read succeeds with one bit wrong.
    FLIPPED_BIT = "flipped-bit"
    #: A read succeeds, but late.
    READ_STALL = "read-stall"
    #: There is no room for a part.
    FULL = "full"
    #: A write fails.
    WRITE_ERROR = "write-error"
    #: A write succeeds, but late.
    WRITE_STALL = "write-stall"
    #: A part cannot be published.
    SEAL_ERROR = "seal-error"
    #: A part cannot be deleted.
    DELETE_ERROR = "delete-error"
    #: The tier cannot be listed.
    SCAN_ERROR = "scan-error"


@dataclass(frozen=True)
class FaultPlan:
    """Which calls fail. A call's fate depends on the seed, the kind and the call's number only, not on threads.

    Attributes:
        seed: another seed, other calls.
        rates: for each kind, the share of calls that it strikes.
        calls: for each kind, the numbers of calls that it strikes, from 0.
        stall: seconds that a stalled call takes at most; None: until `FaultyTier.release_stalls`.
    """

    seed: int = 0
    rates: Mapping[Fault, float] = field(default_factory=dict)
    calls: Mapping[Fault, Collection[int]] = field(default_factory=dict)
    stall: float | None = None

    def strikes(self, kind: Fault, call: int) -> bool:
        """Whether a kind of fault strikes its call of this number."""
        return call in self.calls.get(kind, ()) or self.draw(kind, call) < self.rates.get(kind, 0.0) * 2**64

    def draw(self, kind: Fault, call: int) -> int:
        """64 random bits for a call."""
        digest = blake2b(f"{self.seed} {kind} {call}".encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")


class FaultyTier:
    """A `Tier` that does what its plan says, and otherwise what the inner tier does.

    Args:
        inner: the tier behind.
        plan: what fails.

    Attributes:
        plan: may be replaced at any time; calls go on being counted.
        injected: how often each kind has struck.
        down: while true, every call fails, as if the tier were unmounted.
    """

    def __init__(self, inner: Tier, plan: FaultPlan | None = None) -> None:
        self.inner = inner
        self.plan = plan or FaultPlan()
        self.injected: Counter[Fault] = Counter()
        self.down = False
        self.name = inner.name
        self.capacity = inner.capacity
        self.scope: Scope = inner.scope
        self.depth = inner.depth
        self._calls: Counter[Fault] = Counter()
        self._lock = threading.Lock()
        self._released = threading.Event()

    @property
    def folder(self) -> Path | None:
        """The inner tier's private folder, if it has one."""
        return getattr(self.inner, "folder", None)

    def release_stalls(self) -> None:
        """Let all stalled calls go on, and those that would stall later."""
        self._released.set()

    def read(self, part: PartId, offset: int, into: memoryview) -> None:
        """See `Tier.read`."""
        what = f"tier {self.name}: reading {part.name}"
        self._check_up()
        if self._strikes(Fault.MISSING) is not None:
            raise PartMissing(f"{what} found nothing (injected)")
        self._fail(Fault.READ_ERROR, what)
        if self._strikes(Fault.SHORT_READ) is not None:
            half = len(into) // 2 // ALIGNMENT * ALIGNMENT
            if half:
                self.inner.read(part, offset, into[:half])
            raise TierError(f"{what} gave {half} of {len(into)} bytes (injected)")
        self._stall(Fault.READ_STALL)
        self.inner.read(part, offset, into)
        drawn = self._strikes(Fault.FLIPPED_BIT)
        if drawn is not None:
            bit = drawn % (len(into) * 8)
            into[bit // 8] ^= 1 << bit % 8

    def create(self, part: PartId, nbytes: int) -> "FaultyWriter":
        """See `Tier.create`."""
        self._check_up()
        if self._strikes(Fault.FULL) is not None:
            raise TierFull(f"tier {self.name}: no room for {part.name} (injected)")
        return FaultyWriter(self, self.inner.create(part, nbytes), f"tier {self.name}: writing {part.name}")

    def delete(self, part: PartId) -> None:
        """See `Tier.delete`."""
        self._fail(Fault.DELETE_ERROR, f"tier {self.name}: deleting {part.name}")
        self.inner.delete(part)

    def scan(self) -> Iterator[Scanned]:
        """See `Tier.scan`."""
        self._fail(Fault.SCAN_ERROR, f"tier {self.name}: listing it")
        yield from self.inner.scan()

    def close(self) -> None:
        """See `Tier.close`; stalled calls go on."""
        self.release_stalls()
        self.inner.close()

    def write(self, writer: PartWriter, what: str, offset: int, data: memoryview) -> None:
        """Put something, or fail."""
        self._fail(Fault.WRITE_ERROR, what)
        self._stall(Fault.WRITE_STALL)
        writer.put(offset, data)

    def seal(self, writer: PartWriter, what: str) -> None:
        """Publish something, or fail and forget it."""
        try:
            self._fail(Fault.SEAL_ERROR, what)
        except TierError:
            writer.abort()
            raise
        writer.seal()

    def _check_up(self) -> None:
        if self.down:
            raise TierError(f"tier {self.name} is down (injected)")

    def _strikes(self, kind: Fault) -> int | None:
        """Random bits of the call if the fault strikes it; else None."""
        plan = self.plan
        with self._lock:
            call = self._calls[kind]
            self._calls[kind] += 1
            if not plan.strikes(kind, call):
                return None
            self.injected[kind] += 1
        return plan.draw(kind, call)

    def _fail(self, kind: Fault, what: str) -> None:
        self._check_up()
        if self._strikes(kind) is not None:
            raise TierError(f"{what} failed (injected)")

    def _stall(self, kind: Fault) -> None:
        if self._strikes(kind) is not None:
            self._released.wait(self.plan.stall)


class FaultyWriter:
    """A part being written to a faulty tier."""

    def __init__(self, tier: FaultyTier, inner: PartWriter, what: str) -> None:
        self._tier = tier
        self._inner = inner
        self._what = what

    def put(self, offset: int, data: memoryview) -> None:
        """See `PartWriter.put`."""
        self._tier.write(self._inner, self._what, offset, data)

    def seal(self) -> None:
        """See `PartWriter.seal`."""
        self._tier.seal(self._inner, self._what)

    def abort(self) -> None:
        """See `PartWriter.abort`."""
        self._inner.abort()

    def __enter__(self) -> "FaultyWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
