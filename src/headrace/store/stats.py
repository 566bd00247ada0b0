"""What the store says of itself: counters since it was opened, cheap to take, ready to be sent or printed."""

import msgspec


class TierStats(msgspec.Struct, kw_only=True):
    """One tier.

    Attributes:
        name: of the tier.
        capacity: bytes it may hold.
        used: bytes of its parts, by whichever process written.
        parts: parts it holds.
        evicted: parts that went to make room, since the catalog's owner started.
        dropped: parts that were proven wrong, since the catalog's owner started.
        reads: units read by this process.
        read_bytes: bytes of them.
        read_errors: reads that failed, misses included.
        read_rate: bytes per second while it is read, as measured lately.
        read_seconds: time with at least one read in flight.
        writes: parts written by this process.
        written_bytes: bytes of them.
        write_seconds: time spent writing them.
        write_errors: parts that could not be written.
        skipped: parts not written because it was degraded when their turn came.
        refused: parts the catalog took no reservation for: there already, being written elsewhere, or no room.
        degraded: true while it is not written to because it is full or fails.
        hits: chunks looked up that it held.
        ghost_hits: chunks looked up, seen before, that it would have held had they been saved and kept there.
    """

    name: str
    capacity: int = 0
    used: int = 0
    parts: int = 0
    evicted: int = 0
    dropped: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_errors: int = 0
    read_rate: float = 0.0
    read_seconds: float = 0.0
    writes: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    write_errors: int = 0
    skipped: int = 0
    refused: int = 0
    degraded: bool = False
    hits: int = 0
    ghost_hits: int = 0


class StoreStats(msgspec.Struct, kw_only=True):
    """The whole store.

    Attributes:
        tiers: one entry per tier, in the order of configuration.
        lookups: calls of `lookup` that count.
        lookup_chunks: chunks asked for in them.
        hit_chunks: chunks found in them.
        ghost_hits: chunks not found that were seen before.
        saves_offered: calls of `save`.
        saves_queued: those taken.
        saves_present: those not taken because the part is there, or on its way, already.
        saves_dropped: those not taken because the queue was full.
        saves_cancelled: those given up by their owner.
        saves_failed: parts that reached none of their tiers.
        decisions: how many chunks the policy sent to `none`, `one`, `some` or `all` tiers, and `sample`d.
        saved_bytes: bytes of parts that reached at least one tier, counted once.
        written_bytes: bytes written to all tiers.
        copied_parts: parts copied from one tier to others because their reuse repays it.
        queue_bytes: bytes waiting to be written now.
        wrong_parts: parts found missing or wrong by a load, and dropped.
        hedged_units: reads issued a second time.
        late_units: reads that ended after somebody else had delivered the unit.
        leases: chunks that this store says it is computing or saving, now.
        lease_calls: calls of a catalog about leases.
    """

    tiers: list[TierStats] = []
    lookups: int = 0
    lookup_chunks: int = 0
    hit_chunks: int = 0
    ghost_hits: int = 0
    saves_offered: int = 0
    saves_queued: int = 0
    saves_present: int = 0
    saves_dropped: int = 0
    saves_cancelled: int = 0
    saves_failed: int = 0
    decisions: dict[str, int] = {}
    saved_bytes: int = 0
    written_bytes: int = 0
    copied_parts: int = 0
    queue_bytes: int = 0
    wrong_parts: int = 0
    hedged_units: int = 0
    late_units: int = 0
    leases: int = 0
    lease_calls: int = 0

    @property
    def write_amplification(self) -> float:
        """Bytes written per byte saved; 0 before anything was."""
        return self.written_bytes / self.saved_bytes if self.saved_bytes else 0.0
