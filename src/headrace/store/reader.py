"""Reads for all loads from all tiers at once: threads that draw units from the pool, verify and deliver them.

A thread is one read in flight; a tier has `depth` of them, started when there is work for them. Each takes a unit,
reads it into memory of its own, proves every record with the part's checksums, claims the unit if it is the first, and
copies the records to where they are wanted: where tier and receiver allow it in one call that holds no interpreter lock
(`docs/decisions/0016`). So memory belongs to an attempt until it is over, however late that is. One lock guards pool
and loads; it is held for microseconds, never while bytes move.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from headrace.core.errors import ConfigError
from headrace.store.active_load import ActiveLoad
from headrace.store.buffers import Buffer, BufferPool, Pinning, size_class
from headrace.store.fetch import Fetched, Layers, PartSource, fetch
from headrace.store.layout import HEADER_BYTES, KVLayout
from headrace.store.load import Deliver, FoundChunk
from headrace.store.native.library import prepare
from headrace.store.part import PartId, PartRange
from headrace.store.plan_units import MOST_BYTES, bytes_at_once, plan_units
from headrace.store.read_policies import pool_for
from headrace.store.read_pool import ReadPool
from headrace.store.read_unit import Attempt, Outcome, ReadUnit, Verdict
from headrace.store.tiers.tier import SettlingTier, Tier

log = logging.getLogger(__name__)

#: Seconds that `close` waits for a tier that does not answer.
CLOSE_SECONDS = 5.0

#: Told, in a reading thread, that a part is wrong, or (True) missing, on a tier; once per load, part and tier.
OnBad = Callable[[int, PartId, bool], None]

#: Chunks, what of them, and who gets the records.
LoadRequest = tuple[Sequence[FoundChunk], PartRange, Deliver]


@dataclass(slots=True)
class TierReads:
    """What was read from a tier.

    Attributes:
        units: units read, and right.
        nbytes: bytes of them.
        header_bytes: bytes of headers read beside them.
        errors: reads that failed, for whatever reason.
        wrong: of these, parts that were missing or wrong.
        hedges: units issued here although another tier was at them.
        late_units: units that ended after another tier had delivered them, or after they were cancelled.
        late_bytes: bytes of them.
    """

    units: int = 0
    nbytes: int = 0
    header_bytes: int = 0
    errors: int = 0
    wrong: int = 0
    hedges: int = 0
    late_units: int = 0
    late_bytes: int = 0


@dataclass(slots=True)
class _Crew:
    """The threads of a tier."""

    ready: threading.Condition
    threads: list[threading.Thread] = field(default_factory=list)
    idle: int = 0
    alarm: float | None = None  # when one of the idle ones wakes up by itself, because a hedge may pay then


class _Over(NamedTuple):
    """An attempt that is over, not yet told to anybody; `error`: why its records could not be delivered."""

    attempt: Attempt[Layers]
    fetched: Fetched
    error: Exception | None


class Reader:
    """Loads parts of chunks from several tiers.

    Args:
        tiers: where parts lie; `FoundPart.tiers` are numbers of these. Not closed by `close`.
        layout: of the KV; parts that are not of it are wrong.
        policy: one of `read_policies.POLICIES`.
        unit_bytes: bytes to read at once, at most `MOST_BYTES`; at least one layer of a part is. By default as
            `plan_units.bytes_at_once` says.
        buffers: memory to read into; needs `buffer_bytes` for each read in flight, or reads wait for each other.
        on_bad: told of parts that are missing or wrong.
        hedge: whether slow reads are issued again elsewhere.
        weights: for the policy `static`: shares of the tiers.

    Raises:
        ConfigError: there is no tier, a depth below 1, or no such policy.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        layout: KVLayout,
        policy: str = "completion",
        *,
        unit_bytes: int | None = None,
        buffers: BufferPool | None = None,
        on_bad: OnBad | None = None,
        hedge: bool = True,
        weights: Sequence[float] | None = None,
    ) -> None:
        if not tiers or any(tier.depth < 1 for tier in tiers):
            raise ConfigError("a reader needs at least one tier, and every tier a depth of at least 1")
        prepare()
        self._tiers = tuple(tiers)
        self._layout = layout
        self._unit_bytes = unit_bytes
        depths = [tier.depth for tier in tiers]
        self._pool: ReadPool[Layers] = pool_for(policy, depths, hedge=hedge, weights=weights)
        self._settling = [tier if isinstance(tier, SettlingTier) else None for tier in tiers]
        self._size = buffer_bytes(layout, unit_bytes or MOST_BYTES)
        self._own_buffers = buffers is None
        self._buffers = buffers or BufferPool(read_memory(tiers, layout, unit_bytes or MOST_BYTES))
        self._on_bad = on_bad
        self._lock = threading.Lock()
        self._crews = [_Crew(threading.Condition(self._lock)) for _ in tiers]
        self._reads = [TierReads() for _ in tiers]
        self._numbers = count(1)
        self._closing = False
        self._quiet = threading.Event()
        self._quiet.set()

    def pin(self, pinning: Pinning) -> None:
        """Have the memory that is read into pinned; before the first load."""
        self._buffers.pin(pinning, self._size)

    @property
    def reading(self) -> bool:
        """True while somebody waits for a unit."""
        return not self._quiet.is_set()

    def wait_quiet(self, timeout: float | None = None) -> bool:
        """Return once nobody waits for a unit; False when `timeout` seconds were not enough."""
        return self._quiet.wait(timeout)

    def degraded(self) -> tuple[bool, ...]:
        """Which tiers are left alone because they failed repeatedly: what only they have is a miss for now."""
        now = time.monotonic()
        return tuple(health.paused(now) for health in self._pool.health)

    def reads(self) -> tuple[TierReads, ...]:
        """Counters by tier, since the start."""
        with self._lock:
            return tuple(replace(reads) for reads in self._reads)

    def load(self, chunks: Sequence[FoundChunk], wanted: PartRange, deliver: Deliver) -> ActiveLoad:
        """Begin to load chunks."""
        return self.load_batch([(chunks, wanted, deliver)])[0]

    def load_batch(self, requests: Sequence[LoadRequest]) -> list[ActiveLoad]:
        """Begin to load all that a step needs: early layers of all loads come before later layers of any.

        Args:
            requests: per load the chunks, the layers and heads wanted of them, and who gets the records.
        """
        for_tiers: defaultdict[int, int] = defaultdict(int)
        nbytes = self._unit_bytes or bytes_at_once(
            self._layout, sum(len(chunks) * len(wanted.layers) for chunks, wanted, _ in requests)
        )
        loads = [self._plan(*request, nbytes, for_tiers) for request in requests]
        units = [unit for load in loads for unit in load.units]
        if not units:
            return loads
        with self._lock:
            self._quiet.clear()
            self._pool.add(units, time.monotonic())
            if self._closing:
                self._give_up()
            self._settle()
            for number in range(0 if self._closing else len(self._tiers)):
                self._wake(number, sum(count for holders, count in for_tiers.items() if holders >> number & 1))
        return loads

    def close(self) -> None:
        """Give up all loads and end the threads. Idempotent."""
        with self._lock:
            self._closing = True
            self._give_up()
            for crew in self._crews:
                crew.ready.notify_all()
        until = time.monotonic() + CLOSE_SECONDS
        stuck = []
        for crew, tier in zip(self._crews, self._tiers):
            for thread in crew.threads:
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():
                    stuck.append(tier.name)
        if stuck:
            log.warning("%d reads do not return (%s); they are left behind", len(stuck), ", ".join(sorted(set(stuck))))
        elif self._own_buffers:
            self._buffers.close()

    # Submitting.

    def _plan(
        self,
        chunks: Sequence[FoundChunk],
        wanted: PartRange,
        deliver: Deliver,
        nbytes: int,
        for_tiers: defaultdict[int, int],
    ) -> ActiveLoad:
        """A load and its units; counts units by who holds them."""
        number = next(self._numbers)
        load = ActiveLoad(
            number, len(chunks), wanted, len(self._tiers), deliver, self._lock, self._hasten, self._take_back
        )
        for holders, units in plan_units(load, chunks, wanted, self._layout, nbytes).items():
            for_tiers[holders] += units
        return load

    def _hasten(self, load: ActiveLoad) -> None:
        self._pool.hasten(load.number)

    def _take_back(self, units: list[ReadUnit[Layers]]) -> None:
        self._pool.cancel_units(units)
        if not self._pool.busy:
            self._quiet.set()

    def _settle(self) -> None:
        """Tell loads what the pool lost, and the writer when nothing is left. With the lock held."""
        for unit in self._pool.pop_lost():
            self._lose(unit)
        if not self._pool.busy:
            self._quiet.set()

    def _lose(self, unit: ReadUnit[Layers]) -> None:
        names = ", ".join(tier.name for number, tier in enumerate(self._tiers) if unit.holders >> number & 1)
        unit.what[0].load.lost(unit, f"part {unit.what[0].part.name} cannot be had from {names}")

    def _wake(self, number: int, units: int) -> None:
        """Wake as many idle threads as there are units, start more if need be. With the lock held."""
        crew = self._crews[number]
        crew.ready.notify(min(units, crew.idle))
        for _ in range(min(units - crew.idle, self._tiers[number].depth - len(crew.threads))):
            name = f"read {self._tiers[number].name}"
            crew.threads.append(threading.Thread(target=self._work, args=(number,), name=name, daemon=True))
            crew.threads[-1].start()

    # Reading.

    def _work(self, number: int) -> None:
        tier = self._tiers[number]
        buffer: Buffer | None = None
        over: _Over | None = None
        while True:
            with self._lock:
                if over is not None:
                    self._finish(over)
                    over = None
                attempt = self._take(number)
                if attempt is None and buffer is None and not self._closing:
                    attempt = self._await(number)
                closing = self._closing
            if attempt is None:
                if buffer is not None:
                    buffer.release()
                    buffer = None
                if closing:
                    return
                continue
            if buffer is None:
                buffer = self._buffers.acquire(self._size)
            over = self._read(tier, attempt, buffer.view)
            if over.fetched.outcome is Outcome.WRONG:
                with self._lock:  # others need not wait until that is reported
                    self._finish(over)
                self._report(number, attempt.unit.what[0], over.fetched.missing)
                over = None

    def _read(self, tier: Tier, attempt: Attempt[Layers], memory: memoryview) -> _Over:
        """Read and, if it is the first, deliver."""
        source, first, last = attempt.unit.what
        records = memory[HEADER_BYTES : HEADER_BYTES + (last - first) * source.record_bytes]
        load = source.load
        copy, error = None, None
        if load.native is not None:
            try:
                copy = load.native.copy(source.chunk, source.part, first, last, records)
            except Exception:
                log.exception("how to copy records of %s could not be said", source.part.name)
        fetched = fetch(tier, self._settling[attempt.tier], attempt.tier, self._layout, attempt.unit, memory, copy)
        if fetched.outcome is Outcome.OK:
            try:
                if load.native is not None and copy is not None:
                    load.native.arrived(source.chunk, source.part, first, last)
                else:
                    load.deliver(source.chunk, source.part, first, last, records)
            except Exception as caught:
                log.exception("records of %s could not be delivered", source.part.name)
                error = caught
        return _Over(attempt, fetched, error)

    def _take(self, number: int) -> Attempt[Layers] | None:
        """The next attempt, if there is one now; wakes another thread when there is more. With the lock held."""
        attempt = self._pool.take(number, time.monotonic())
        if attempt is not None:
            crew = self._crews[number]
            self._reads[number].hedges += attempt.hedge
            if crew.idle and (attempt.hedge or self._pool.takeable(number)):
                crew.ready.notify()
        return attempt

    def _await(self, number: int) -> Attempt[Layers] | None:
        """Wait once, until something may have come for the tier, and try. With the lock held."""
        crew = self._crews[number]
        now = time.monotonic()
        when = self._pool.look_again(number, now)
        crew.idle += 1
        if when is None or (crew.alarm is not None and crew.alarm <= when):
            crew.ready.wait()
        else:
            crew.alarm = when
            crew.ready.wait(max(when - now, 1e-4))
            if crew.alarm == when:
                crew.alarm = None
        crew.idle -= 1
        return self._take(number)

    def _finish(self, over: _Over) -> None:
        """Tell the pool, the counters and the load. With the lock held."""
        attempt, fetched, error = over
        reads = self._reads[attempt.tier]
        reads.header_bytes += fetched.header_bytes
        unit = attempt.unit
        load = unit.what[0].load
        verdict = self._pool.finish(attempt, fetched.outcome, time.monotonic())
        if fetched.outcome in (Outcome.OK, Outcome.LATE):
            reads.units += 1
            reads.nbytes += unit.nbytes
            if verdict is Verdict.LATE:
                reads.late_units += 1
                reads.late_bytes += unit.nbytes
                return
            if not self._pool.busy:
                self._quiet.set()
            if error is None:
                load.delivered(unit, attempt.tier)
            else:
                load.undelivered(unit, error)
                self._settle()
            return
        reads.errors += 1
        reads.wrong += fetched.outcome is Outcome.WRONG
        if verdict is Verdict.LOST:
            self._lose(unit)
        self._settle()
        # Others may take what this one could not, or what its tier was to read before it was paused.
        for number, other in enumerate(self._tiers):
            if number != attempt.tier and self._pool.takeable(number):
                self._wake(number, other.depth)

    def _report(self, number: int, source: PartSource, missing: bool) -> None:
        with self._lock:
            known = source.bad >> number & 1
            source.bad |= 1 << number
        if not known and self._on_bad is not None:
            self._on_bad(number, source.part, missing)

    def _give_up(self) -> None:
        """Fail what nobody will read any more. With the lock held."""
        for unit in self._pool.owned():
            unit.what[0].load.give_up("the store is closed")


def buffer_bytes(layout: KVLayout, unit_bytes: int = MOST_BYTES) -> int:
    """Bytes that one read in flight needs."""
    return HEADER_BYTES + max(unit_bytes, layout.record_bytes(layout.kv_heads, layout.chunk_tokens))


def read_memory(tiers: Sequence[Tier], layout: KVLayout, unit_bytes: int = MOST_BYTES) -> int:
    """Limit of a buffer pool in which no read of these tiers waits for another's memory."""
    return max(1, sum(tier.depth for tier in tiers)) * size_class(buffer_bytes(layout, unit_bytes))
