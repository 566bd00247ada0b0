"""Deferred, replicated writes: parts are packed as their layers become ready, and written when nobody waits for it.

One thread packs (copies and sums, without the interpreter lock), one per tier writes, so that a slow or failing tier
holds nobody up but itself. Memory is bounded: a save takes a buffer of the part's size from a pool when it begins, or
is refused; a tier that is behind with half of the pool takes no more.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.store.buffers import BufferPool, Pinning, size_class
from headrace.store.catalog.catalog import Catalog
from headrace.store.header import BadHeader, PartHeader, decode, record_sum
from headrace.store.layout import HEADER_BYTES, KVLayout
from headrace.store.part import PartId
from headrace.store.part_save import PartSave, PartWork
from headrace.store.save import Pack, SaveSpec
from headrace.store.tier_speed import TierHealth, TierSpeed
from headrace.store.tiers.tier import PartCutShort, PartMissing, Tier, TierError, TierFull
from headrace.store.write_gate import WriteGate

log = logging.getLogger("headrace.store")

#: Bytes written between two looks at the gate.
SLICE = 2 << 20
#: Layers that wait to be packed before their thread wakes, unless they are the last of a part. Each wake takes a core
#: and the interpreter lock from a forward pass on the CPU, so they should be few.
PACK_AT_ONCE = 16
#: Seconds that `close` waits for a thread that a tier does not give back.
CLOSE_SECONDS = 10.0


@dataclass(slots=True)
class TierWrites:
    """Counters of one tier; a snapshot may be a moment old."""

    writes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    errors: int = 0
    refused: int = 0
    skipped: int = 0


class _Queue:
    """What a tier has to write."""

    def __init__(self, lock: threading.Lock) -> None:
        self.work: deque[PartWork] = deque()
        self.nbytes = 0
        self.wake = threading.Condition(lock)


class DeferredWriter:
    """The writing side of a store.

    Args:
        layout: of the parts.
        tiers: where to.
        catalogs: of the tiers.
        limit: bytes of parts in memory at once; at least one part always fits.
        gate: says when to write.
        unsaved: called with a part that reached no tier (in any thread).
        wrong: called with a tier and a part that was found missing or wrong while it was copied.
        over: called with every part that `save` took when nothing more becomes of it, and whether a tier has it by then
            (in any thread).
    """

    def __init__(
        self,
        layout: KVLayout,
        tiers: Sequence[Tier],
        catalogs: Sequence[Catalog],
        limit: int,
        gate: WriteGate,
        unsaved: Callable[[PartId], None],
        wrong: Callable[[int, PartId], None],
        over: Callable[[PartId, bool], None] = lambda part, stored: None,
    ) -> None:
        self._layout, self._gate = layout, gate
        self._tiers, self._catalogs = tuple(tiers), tuple(catalogs)
        self._unsaved, self._wrong, self._ended = unsaved, wrong, over
        self._limit = max(limit, size_class(layout.part_bytes(layout.layers, layout.kv_heads, layout.chunk_tokens)))
        self._pool = BufferPool(self._limit)
        self._lock = threading.Lock()
        self._to_pack: deque[tuple[PartSave, int]] = deque()
        self._pack_wake = threading.Condition(self._lock)
        self._pack_due = False
        self._flushing = 0
        self._queues = [_Queue(self._lock) for _ in tiers]
        self._quiet_wake = threading.Condition(self._lock)
        self._busy = 0  # layers being packed and parts being written right now
        self._open: set[PartSave] = set()  # not packed yet
        self._pending: set[PartId] = set()
        self._stopping = False
        self.queue_bytes = 0
        self.counts = [TierWrites() for _ in tiers]
        self.events: Counter[str] = Counter()
        self.speeds = tuple(TierSpeed() for _ in tiers)
        self._health = tuple(TierHealth() for _ in tiers)
        self._threads = [threading.Thread(target=self._pack_loop, name="headrace-pack", daemon=True)]
        for tier in range(len(tiers)):
            name = f"headrace-write-{tier}"
            self._threads.append(threading.Thread(target=self._write_loop, args=(tier,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def pin(self, pinning: Pinning) -> None:
        """Have the memory that is packed into pinned; before the first save."""
        layout = self._layout
        self._pool.pin(pinning, layout.part_bytes(layout.layers, layout.kv_heads, layout.chunk_tokens))

    @property
    def buffers_in_use(self) -> int:
        """Buffers held: 0 when nothing is on its way."""
        return self._pool.in_use

    def degraded(self, tier: int) -> bool:
        """True while a tier is not written to because it is full or fails."""
        return self._health[tier].paused(time.monotonic())

    def writable(self, tier: int) -> bool:
        """True when it makes sense to send a part to the tier: it works, and is not far behind the others."""
        share = 1 if len(self._tiers) == 1 else 2
        return not self.degraded(tier) and self._queues[tier].nbytes * share <= self._limit

    def pending(self, part: PartId) -> bool:
        """True while a part is on its way."""
        return part in self._pending

    def save(self, spec: SaveSpec, pack: Pack, tiers: tuple[int, ...]) -> PartSave | None:
        """Begin to save a part; None when there is no room for it, or it is on its way already."""
        covers = spec.part.range
        nbytes = self._layout.part_bytes(len(covers.layers), len(covers.heads), spec.n_tokens)
        work = self._admit(spec.part, nbytes, spec.weight, len(tiers))
        if work is None:
            return None
        save = PartSave(self, spec, pack, tiers, work)
        with self._lock:
            self._open.add(save)
        return save

    def copy(self, part: PartId, n_tokens: int, source: int, tiers: tuple[int, ...], weight: float) -> bool:
        """Copy a part from one tier to others, verified on the way; False when there is no room for it."""
        nbytes = self._layout.part_bytes(len(part.range.layers), len(part.range.heads), n_tokens)
        work = self._admit(part, nbytes, weight, len(tiers))
        if work is None:
            return False
        work.source, work.then = source, tiers[1:]
        self._send(work, tiers[:1])
        return True

    def flush(self, timeout: float) -> bool:
        """Write what is ready to be, whatever the gate says; False when `timeout` seconds were not enough."""
        self._gate.force(True)
        try:
            with self._lock:
                self._flushing += 1
                self._pack_wake.notify()
                return self._quiet_wake.wait_for(self._quiet, timeout)
        finally:
            with self._lock:
                self._flushing -= 1
            self._gate.force(False)

    def close(self) -> None:
        """Give up what is not written and end the threads. Idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            unpacked = list(self._open)
            self._pack_wake.notify_all()
            for queue in self._queues:
                queue.wake.notify_all()
        self._gate.force(True)
        for save in unpacked:
            save.cancel()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                log.warning("a tier does not answer; leaving a writing thread behind", extra={"thread": thread.name})
        for tier, queue in enumerate(self._queues):
            while queue.work:
                work = queue.work.popleft()
                work.cancelled = True
                self._turn_over(tier, work)
        self._pool.close()

    # Called by saves.

    def ready(self, save: PartSave, layer: int) -> None:
        """A layer of a save is there to be packed."""
        with self._lock:
            self._to_pack.append((save, layer))
            if save.complete or len(self._to_pack) >= PACK_AT_ONCE or self._flushing:
                self._pack_due = True
                self._pack_wake.notify()

    def given_up(self, save: PartSave) -> None:
        """A save ended before it was packed."""
        with self._lock:
            self._open.discard(save)
            self.events["cancelled"] += 1
        self._over(save.work)

    # Parts in memory.

    def _admit(self, part: PartId, nbytes: int, weight: float, tiers: int) -> PartWork | None:
        with self._lock:
            if self._stopping or part in self._pending or size_class(nbytes) > self._limit:
                return None
            buffer = self._pool.try_acquire(nbytes)
            if buffer is None:
                return None
            self._pending.add(part)
            self.queue_bytes += nbytes
        return PartWork(part, nbytes, weight, buffer, tiers)

    def _send(self, work: PartWork, tiers: tuple[int, ...]) -> None:
        with self._lock:
            for tier in tiers:
                queue = self._queues[tier]
                queue.work.append(work)
                queue.nbytes += work.nbytes
                queue.wake.notify()

    def _turn_over(self, tier: int, work: PartWork) -> None:
        """A tier has had its turn with a part, for good or bad."""
        with self._lock:
            self._queues[tier].nbytes -= work.nbytes
            work.left -= 1
            if work.left:
                return
            if work.reached:
                self.events["copied" if work.source is not None else "saved"] += 1
                self.events["saved_bytes"] += work.nbytes if work.source is None else 0
            elif work.source is not None:
                self.events["copies_failed"] += 1
            elif work.cancelled:
                self.events["cancelled"] += 1
            elif not work.refused:
                self.events["failed"] += 1
        self._over(work)

    def _over(self, work: PartWork) -> None:
        work.buffer.release()
        if not work.reached and not work.refused and work.source is None:
            self._unsaved(work.part)
        with self._lock:
            self._pending.discard(work.part)
            self.queue_bytes -= work.nbytes
        if work.source is None:
            self._ended(work.part, work.reached > 0)

    def _quiet(self) -> bool:
        return not self._busy and not self._to_pack and not any(queue.work for queue in self._queues)

    def _free(self) -> None:
        """A thread has finished something."""
        with self._lock:
            self._busy -= 1
            if self._quiet():
                self._quiet_wake.notify_all()

    # Threads.

    def _pack_loop(self) -> None:
        while True:
            with self._lock:
                self._pack_wake.wait_for(lambda: self._pack_due or self._stopping or (self._flushing and self._to_pack))
                if self._stopping:
                    return
                layers = list(self._to_pack)
                self._to_pack.clear()
                self._pack_due = False
                self._busy += 1
            for save, layer in layers:
                nbytes = self._layout.payload_bytes(len(save.spec.part.range.heads), save.spec.n_tokens)
                if save.pack_layer(layer, nbytes):
                    self._seal(save)
            del layers, save
            self._free()

    def _seal(self, save: PartSave) -> None:
        """All records are there: put the header in front and send the part on its way."""
        spec = save.spec
        sums = tuple(save.sums[layer] for layer in spec.part.range.layers)
        header = PartHeader.of(self._layout, spec.part, spec.n_tokens, sums, time.time(), spec.salt_tag)
        save.work.buffer.view[:HEADER_BYTES] = header.encode()
        with self._lock:
            self._open.discard(save)
        self._send(save.work, save.tiers)

    def _write_loop(self, tier: int) -> None:
        queue = self._queues[tier]
        while True:
            with self._lock:
                queue.wake.wait_for(lambda: queue.work or self._stopping)
                if self._stopping:
                    return
                work = queue.work.popleft()
                self._busy += 1
            try:
                self._gate.wait()
                if not work.cancelled and (work.source is None or self._read(work)):
                    self._write(tier, work)
            except Exception:  # of a catalog or a tier that breaks its word: this part is lost, the thread is not
                log.exception("a part could not be written", extra={"tier": self._tiers[tier].name})
                self._failed(tier, full=False)
            finally:
                self._turn_over(tier, work)
                del work
                self._free()

    def _write(self, tier: int, work: PartWork) -> None:
        counts, part = self.counts[tier], work.part
        if self.degraded(tier):
            counts.skipped += 1
            return
        if not self._catalogs[tier].reserve(part, work.nbytes, work.weight):
            counts.refused += 1
            work.refused += 1
            return
        published = False
        try:
            if seconds := self._put(tier, work):
                self._catalogs[tier].publish(part)
                published = True
        except TierError as error:
            if self._failed(tier, full=isinstance(error, TierFull)):
                log.warning(
                    "a tier is not written to for now", extra={"tier": self._tiers[tier].name, "why": str(error)}
                )
            return
        finally:
            if not published:
                self._catalogs[tier].withdraw(part)
        if published:
            work.reached += 1
            self._health[tier].succeeded()
            self.speeds[tier].observe(work.nbytes, seconds)
            counts.writes += 1
            counts.written_bytes += work.nbytes
            counts.seconds += seconds

    def _put(self, tier: int, work: PartWork) -> float:
        """Write and seal; returns the seconds that the tier took, 0 when the save was cancelled meanwhile."""
        view = work.buffer.view
        clock = time.perf_counter
        begun = clock()
        with self._tiers[tier].create(work.part, work.nbytes) as writer:
            seconds = clock() - begun
            for offset in range(0, work.nbytes, SLICE):
                self._gate.wait()
                if work.cancelled:
                    return 0.0
                begun = clock()
                with view[offset : offset + SLICE] as piece:
                    writer.put(offset, piece)
                seconds += clock() - begun
            begun = clock()
            writer.seal()
            return seconds + clock() - begun

    def _read(self, work: PartWork) -> bool:
        """Fill a part to be copied from the tier that has it, and send it on to the other tiers it is for."""
        source, view = work.source, work.buffer.view
        assert source is not None
        try:
            for offset in range(0, work.nbytes, SLICE):
                self._gate.wait()
                with view[offset : offset + SLICE] as piece:
                    self._tiers[source].read(work.part, offset, piece)
            header = decode(view[:HEADER_BYTES])
            header.check(work.part, self._layout)
            if header.part_bytes != work.nbytes:
                raise BadHeader(f"part {work.part.name} has {header.part_bytes} bytes, expected {work.nbytes}")
            for layer in work.part.range.layers:
                at = header.offset_of(layer)
                with view[at : at + header.record_bytes] as record:
                    if record_sum(record) != header.sum_of(layer):
                        raise BadHeader(f"layer {layer} of part {work.part.name} does not match its checksum")
        except TierError as error:
            if isinstance(error, BadHeader | PartCutShort | PartMissing):
                self._wrong(source, work.part)
            with self._lock:
                work.left = 1
                work.cancelled = True
            return False
        self._send(work, work.then)
        return True

    def _failed(self, tier: int, full: bool) -> bool:
        """Count an error; True when the tier is left alone for a while from now on."""
        self.counts[tier].errors += 1
        now, health = time.monotonic(), self._health[tier]
        begins = health.failed(now)
        while full and not health.paused(now):  # nothing gets better by trying again at once
            begins = health.failed(now)
        return begins
