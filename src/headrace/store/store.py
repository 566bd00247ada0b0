"""The front door of the store: look up, load, save, flush."""

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import ConfigError
from headrace.store.buffers import Pinning
from headrace.store.catalog.catalog import Catalog
from headrace.store.catalog.election import open_catalog
from headrace.store.coverage import found_chunk
from headrace.store.keys import ChunkHasher
from headrace.store.layout import KVLayout
from headrace.store.lease_book import LeaseBook
from headrace.store.load import Deliver, FoundChunk, Load
from headrace.store.part import PartId, PartRange
from headrace.store.read_meter import MeteredTier
from headrace.store.reader import Reader
from headrace.store.replication import ReplicationPolicy, TierView
from headrace.store.save import Pack, Save, SaveSpec
from headrace.store.settings import StoreSettings
from headrace.store.stats import StoreStats, TierStats
from headrace.store.tiers.tier import Tier
from headrace.store.write_gate import WriteGate
from headrace.store.writer import DeferredWriter


class KVStore:
    """KV of prefixes in several tiers at once; needs no engine.

    Example, one chunk of 16 tokens of a model of 2 layers saved and loaded::

        layout = KVLayout("any text", layers=2, kv_heads=1, head_dim=8, dtype="float32", chunk_tokens=16)
        store = KVStore(layout, [DirTier(Path("/tmp/kv"), capacity=1 << 30)])
        whole = PartRange(0, 2, 0, 1)
        key = store.keys(np.arange(16, dtype=np.int32))[0]
        kv = np.random.rand(2, 2, 1, 16, 8).astype("f4")  # layer, K and V, head, token, element

        def pack(layer, record):
            np.frombuffer(record, "f4").reshape(kv.shape[1:])[:] = kv[layer]

        save = store.save(SaveSpec(PartId(key, whole), n_tokens=16, chunk=0, weight=1.0), pack)
        for layer in range(2):
            save.layer_ready(layer)
        store.flush(timeout=10)

        back = np.empty_like(kv)

        def deliver(chunk, part, first, last, records):
            for layer, record in records_in(first, last, records, layout.payload_bytes(1, 16)):
                back[layer] = np.frombuffer(record, "f4").reshape(kv.shape[1:])

        store.load(store.lookup([key], whole), whole, deliver).wait_all()
        store.close()

    All methods may be called from any thread. `lookup`, `lease`, `leased`, `release` and `save` ask catalogs, which
    takes microseconds where this process owns the tier and a round trip over a unix socket where another does.

    Args:
        layout: of the model's KV.
        tiers: where parts lie, the fastest first; closed by `close`.
        settings: how it behaves.
        clock: seconds that never run backwards, for leases and times to live.

    Raises:
        ConfigError: no tier, or two of one name.
        TierError: a tier cannot be used.
    """

    def __init__(
        self,
        layout: KVLayout,
        tiers: Sequence[Tier],
        settings: StoreSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or StoreSettings()
        names = [tier.name for tier in tiers]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a store needs tiers of different names, got {', '.join(names) or 'none'}")
        self.layout, self.tiers, self.settings = layout, tuple(tiers), settings
        self._hasher = ChunkHasher(layout.fingerprint, layout.chunk_tokens)
        self._catalogs: list[Catalog] = []
        self._stats = StoreStats()
        self._lock = threading.Lock()  # of the policy and the counters
        self._policy = ReplicationPolicy(len(tiers), settings.replication, settings.ttl)
        self._weight = 0.0  # of the chunks saved lately, seconds
        self._meters = [MeteredTier(tier) for tier in tiers]
        self._reader = Reader(self._meters, layout, settings.read_policy, on_bad=self._bad)
        try:
            for tier in tiers:
                self._catalogs.append(open_catalog(tier, time_to_live=settings.ttl, clock=clock))
        except BaseException:
            for catalog in self._catalogs:
                catalog.close()
            raise
        shared = [c for tier, c in zip(tiers, self._catalogs) if getattr(tier, "folder", None) is not None]
        holder = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._leases = LeaseBook((shared or self._catalogs)[-1], holder, settings.lease_seconds, clock)
        self._gate = WriteGate(self._reader.wait_quiet, settings.idle_seconds)
        if not settings.deferred_writes:
            self._gate.force(True)
        self._writer = DeferredWriter(
            layout, tiers, self._catalogs, settings.write_queue, self._gate, self._unsaved, self._wrong, self._over
        )

    def pin(self, pinning: Pinning) -> None:
        """Have all memory that KV is read into and packed into pinned; before the first load and save."""
        self._reader.pin(pinning)
        self._writer.pin(pinning)

    def keys(self, tokens: NDArray[np.int32], salt: str = "", known: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of the full chunks of a token sequence.

        Args:
            tokens: `[n]`.
            salt: the request's `cache_salt`.
            known: keys of its first chunks, where they were asked for before.
        """
        return self._hasher.extend(known, tokens, salt)

    def lookup(self, keys: Sequence[bytes], wanted: PartRange, count: bool = True) -> list[FoundChunk]:
        """The longest prefix of chunks whose parts cover `wanted`, all tiers merged.

        Args:
            keys: of the chunks, in order.
            wanted: layers and heads.
            count: whether the replication policy and the counters see it; False when a request asks again.
        """
        found: list[FoundChunk] = []
        for key, held in zip(keys, self._held(keys)):
            chunk = found_chunk(key, self.layout.chunk_tokens, held, wanted)
            if chunk is None:
                break
            found.append(chunk)
        if count and keys:
            self._asked(keys, found)
        return found

    def load(self, chunks: Sequence[FoundChunk], wanted: PartRange, deliver: Deliver) -> Load:
        """Begin to load chunks; `deliver` is called in reading threads, see `load.Deliver`.

        The loads of one step should come as one `load_batch`, so that early layers of all of them arrive first.
        """
        return self._reader.load(chunks, wanted, deliver)

    def load_batch(self, loads: Sequence[tuple[Sequence[FoundChunk], PartRange, Deliver]]) -> Sequence[Load]:
        """Begin all loads of a step at once, layer-major over all of them."""
        return self._reader.load_batch(loads)

    def save(self, spec: SaveSpec, pack: Pack) -> Save | None:
        """Begin to save a part; call `Save.layer_ready` for each of its layers as they become complete.

        Returns:
            None when the policy says no, the part is there or on its way, or the queue is full; each is counted.
        """
        part = spec.part
        on_its_way = self._writer.pending(part)
        present = on_its_way or any(
            part.range in ranges for catalog in self._catalogs for ranges in catalog.find([part.key])
        )
        nbytes = self.layout.part_bytes(len(part.range.layers), len(part.range.heads), spec.n_tokens)
        with self._lock:
            self._stats.saves_offered += 1
            self._stats.saves_present += present
            if not present:
                self._weight += 0.1 * (spec.weight - self._weight) if self._weight else spec.weight
                decision = self._policy.decide(spec, nbytes, self._views(), time.monotonic())
        if present or not decision.tiers:
            if not on_its_way:
                self._leases.over(part.key, present)
            return None
        self._leases.saving(part.key)
        save = self._writer.save(spec, pack, decision.tiers)
        with self._lock:
            if save is None:
                self._stats.saves_dropped += 1
                self._policy.lost(part.key)
            else:
                self._stats.saves_queued += 1
        if save is None:
            self._leases.over(part.key, False)
        return save

    def would_save(self, keys: Sequence[bytes], first: int, weight: float, wanted: PartRange) -> int:
        """How many new chunks, from the first, `save` would take now; nothing is counted.

        Args:
            keys: of the chunks, in order.
            first: number of the first of them in its prefix.
            weight: seconds it takes to compute one of them.
            wanted: layers and heads of their parts.
        """
        nbytes = self.layout.part_bytes(len(wanted.layers), len(wanted.heads), self.layout.chunk_tokens)
        with self._lock:
            return self._policy.expects(keys, first, weight, nbytes, self._views(), time.monotonic())

    def lease(self, keys: Sequence[bytes]) -> int:
        """Say that this store computes these chunks now.

        The lease on a chunk ends with its save, also with one that is refused, with `release`, or after
        `StoreSettings.lease_seconds` without `renew`.

        Returns:
            How many, from the first, are now its own; the next one is somebody else's.
        """
        return self._leases.take(keys)

    def leased(self, keys: Sequence[bytes]) -> list[bool]:
        """For each chunk: does another process (or another store in this one) compute it now?"""
        return self._leases.leased(keys)

    def renew(self) -> None:
        """To be called often while chunks are computed: sees to it that their leases last. Mostly does nothing."""
        self._leases.renew()

    def release(self, keys: Sequence[bytes]) -> None:
        """This store computes these chunks no more; a lease on one whose save has begun ends with that."""
        self._leases.give_up(keys)

    def forward(self, running: bool) -> None:
        """The engine begins or ends a forward pass: writes flow while one runs, and when none came for a while."""
        self._gate.forward(running)

    def stats(self) -> StoreStats:
        """Counters since the store was opened."""
        writer, reads = self._writer, self._reader.reads()
        failing = self._reader.degraded()
        tiers = []
        for i, (tier, catalog) in enumerate(zip(self.tiers, self._catalogs)):
            usage, writes = catalog.usage(), writer.counts[i]
            tiers.append(
                TierStats(
                    name=tier.name,
                    capacity=usage.capacity,
                    used=usage.used,
                    parts=usage.parts,
                    evicted=usage.evicted,
                    dropped=usage.dropped,
                    reads=reads[i].units,
                    read_bytes=reads[i].nbytes + reads[i].header_bytes,
                    read_errors=reads[i].errors,
                    read_rate=self._meters[i].rate,
                    read_seconds=self._meters[i].busy_seconds,
                    writes=writes.writes,
                    written_bytes=writes.written_bytes,
                    write_seconds=writes.seconds,
                    write_errors=writes.errors,
                    refused=writes.refused,
                    skipped=writes.skipped,
                    degraded=writer.degraded(i) or failing[i],
                    hits=self._policy.hits[i],
                    ghost_hits=self._policy.ghosts[i],
                )
            )
        with self._lock:
            mine = self._stats
            return StoreStats(
                tiers=tiers,
                lookups=mine.lookups,
                lookup_chunks=mine.lookup_chunks,
                hit_chunks=mine.hit_chunks,
                ghost_hits=self._policy.ghost_hits,
                saves_offered=mine.saves_offered,
                saves_queued=mine.saves_queued,
                saves_present=mine.saves_present,
                saves_dropped=mine.saves_dropped,
                saves_cancelled=writer.events["cancelled"],
                saves_failed=writer.events["failed"],
                decisions=dict(self._policy.decisions),
                saved_bytes=writer.events["saved_bytes"],
                written_bytes=sum(tier.written_bytes for tier in tiers),
                copied_parts=writer.events["copied"],
                queue_bytes=writer.queue_bytes,
                wrong_parts=mine.wrong_parts,
                hedged_units=sum(read.hedges for read in reads),
                late_units=sum(read.late_units for read in reads),
                leases=self._leases.held,
                lease_calls=self._leases.calls,
            )

    def flush(self, timeout: float) -> bool:
        """Write what waits to be written, whether or not a forward pass runs.

        Returns:
            True when everything ready was written; False when `timeout` seconds were not enough.
        """
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Give up what is not written (call `flush` before), end all threads, let go of catalogs and tiers."""
        self._writer.close()
        self._reader.close()
        self._leases.close()
        for catalog in self._catalogs:
            catalog.close()
        for tier in self.tiers:
            tier.close()

    # Below: from lookups and failures to the policy.

    def _held(self, keys: Sequence[bytes]) -> list[tuple[tuple[PartRange, ...], ...]]:
        """Per chunk and tier the parts there are, up to the first chunk that no tier has anything of."""
        found: list[list[tuple[PartRange, ...]]] = [[] for _ in self._catalogs]
        count = 0
        while count < len(keys):
            for ranges, catalog in zip(found, self._catalogs):
                if len(ranges) == count:  # its answer ended before what it lacks; another tier had that
                    ranges += catalog.find(keys[count:])
                    if len(ranges) < len(keys):
                        ranges.append(())
            if not any(ranges[count] for ranges in found):
                break
            count += 1
        return list(zip(*(ranges[:count] for ranges in found)))

    def _views(self) -> list[TierView]:
        views = []
        for i, tier in enumerate(self.tiers):
            speed = self._writer.speeds[i]
            write_rate = (1 << 20) / speed.expected(1 << 20)
            views.append(TierView(tier.capacity, self._meters[i].rate, write_rate, self._writer.writable(i)))
        return views

    def _asked(self, keys: Sequence[bytes], found: Sequence[FoundChunk]) -> None:
        held = [sum(1 << t for t in {t for part in chunk.parts for t in part.tiers}) for chunk in found]
        with self._lock:
            self._stats.lookups += 1
            self._stats.lookup_chunks += len(keys)
            self._stats.hit_chunks += len(found)
            copies = self._policy.asked(keys, held, self._views(), time.monotonic())
            weight = self._weight
        if copies:
            by_key = {chunk.key: chunk for chunk in found}
            for copy in copies:
                chunk = by_key[copy.key]
                if len(chunk.parts) == 1:
                    part = chunk.parts[0]
                    source = part.tiers[0]
                    self._writer.copy(PartId(chunk.key, part.range), chunk.n_tokens, source, copy.tiers, weight)

    def _unsaved(self, part: PartId) -> None:
        with self._lock:
            self._policy.lost(part.key)

    def _over(self, part: PartId, stored: bool) -> None:
        self._leases.over(part.key, stored)

    def _wrong(self, tier: int, part: PartId) -> None:
        with self._lock:
            self._stats.wrong_parts += 1
        self._catalogs[tier].drop(part)

    def _bad(self, tier: int, part: PartId, missing: bool) -> None:
        self._wrong(tier, part)
