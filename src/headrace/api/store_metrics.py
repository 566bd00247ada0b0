"""Samples of the KV store: what it was asked for, what it wrote, how full its tiers are."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.core.events import EngineStats

_LABELS = ("model_name",)

#: Name in the store's counters -> what it says. `decisions_*` are one family of their own.
_COUNTERS = {
    "lookups": "Prefixes looked up.",
    "lookup_chunks": "Chunks looked up.",
    "hit_chunks": "Chunks found.",
    "ghost_hits": "Chunks not found that were seen before.",
    "saves_offered": "Chunks offered for saving.",
    "saves_queued": "Chunks taken.",
    "saves_present": "Chunks not taken because they are there already.",
    "saves_dropped": "Chunks not taken because the queue was full.",
    "saves_cancelled": "Saves given up by the engine.",
    "saves_failed": "Chunks that reached no tier.",
    "saves_skipped": "Chunks not offered because too many pages wait to be packed.",
    "saved_bytes": "Bytes saved, counted once.",
    "written_bytes": "Bytes written to all tiers.",
    "copied_parts": "Parts copied to more tiers because their reuse repays it.",
    "wrong_parts": "Parts found missing or wrong.",
    "hedged_units": "Reads issued a second time.",
    "late_units": "Reads that ended after another had brought the same.",
    "lease_calls": "Times that a catalog was asked or told who computes what.",
    "waits": "Sequences that waited for chunks another engine was computing.",
    "wait_seconds": "Time they waited.",
    "waits_given_up": "Of them, those that computed the chunks after all.",
}
_GAUGES = {
    "queue_bytes": "Bytes waiting to be written.",
    "leases": "Chunks that the engine is computing or writing for all.",
    "write_amplification": "Bytes written per byte saved.",
}
_TIER_COUNTERS = {
    "reads": "Units read.",
    "read_bytes": "Bytes read.",
    "read_errors": "Reads that failed.",
    "writes": "Parts written.",
    "written_bytes": "Bytes written.",
    "write_seconds": "Time spent writing.",
    "write_errors": "Parts that could not be written.",
    "evicted": "Parts that went to make room.",
    "hits": "Chunks looked up that the tier held.",
    "ghost_hits": "Chunks looked up, seen before, that the tier would have held.",
}
_TIER_GAUGES = {
    "capacity": "Bytes it may hold.",
    "used": "Bytes it holds.",
    "parts": "Parts it holds.",
    "degraded": "1 while it is not written to because it is full or fails.",
}


def store_metrics(model: str, stats: EngineStats) -> Iterator[Metric]:
    """Samples from an engine's statistics.

    Args:
        model: label `model_name`.
        stats: of the engine.
    """
    for name, help in _COUNTERS.items():
        counter = CounterMetricFamily(f"headrace:store_{name}", help, labels=_LABELS)
        counter.add_metric((model,), stats.store.get(name, 0.0))
        yield counter
    for name, help in _GAUGES.items():
        gauge = GaugeMetricFamily(f"headrace:store_{name}", help, labels=_LABELS)
        gauge.add_metric((model,), stats.store.get(name, 0.0))
        yield gauge
    decided = CounterMetricFamily(
        "headrace:store_decisions", "Chunks by the tiers they were sent to.", labels=(*_LABELS, "tiers")
    )
    for name, count in stats.store.items():
        if name.startswith("decisions_"):
            decided.add_metric((model, name.removeprefix("decisions_")), count)
    yield decided
    for name, help in _TIER_COUNTERS.items():
        tier_counter = CounterMetricFamily(f"headrace:store_tier_{name}", help, labels=(*_LABELS, "tier"))
        for tier, values in stats.store_tiers.items():
            tier_counter.add_metric((model, tier), values.get(name, 0.0))
        yield tier_counter
    for name, help in _TIER_GAUGES.items():
        tier_gauge = GaugeMetricFamily(f"headrace:store_tier_{name}", help, labels=(*_LABELS, "tier"))
        for tier, values in stats.store_tiers.items():
            tier_gauge.add_metric((model, tier), values.get(name, 0.0))
        yield tier_gauge
