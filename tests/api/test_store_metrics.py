"""What /metrics and the request log say of the KV store."""

from typing import Any

import msgspec
from test_metrics import samples

from headrace.api.mailbox import merge
from headrace.api.meter import Meter
from headrace.api.metrics import Metrics
from headrace.core.events import Delta, EngineStats
from headrace.front.output import TextDelta


def text(**fields: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return samples(Metrics("m").text(EngineStats(**fields)).decode())


def test_prompt_tokens_by_source_add_up() -> None:
    found = text(
        prompt_tokens_total=100,
        hit_tokens_total=60,
        hit_tokens_by_source={"pool": 10, "memory": 20, "dir:/x": 30},
        loads_total=3,
        loads_failed_total=1,
        load_wait_seconds_total=0.5,
    )
    by_source = {
        labels[0][1]: value
        for (name, labels), value in found.items()
        if name == "headrace:prompt_tokens_by_source_total"
    }
    assert by_source == {"computed": 40, "pool": 10, "memory": 20, "dir:/x": 30}
    assert sum(by_source.values()) == found["headrace:prompt_tokens_total", ()]
    assert found["headrace:store_loads_total", ()] == 3
    assert found["headrace:store_loads_failed_total", ()] == 1
    assert found["headrace:store_load_wait_seconds_total", ()] == 0.5
    assert not any(name.startswith("headrace:store_tier") for name, _ in found)


def test_the_stores_counters_and_its_tiers() -> None:
    found = text(
        store={"written_bytes": 300.0, "saved_bytes": 200.0, "write_amplification": 1.5, "decisions_all": 7.0},
        store_tiers={"memory": {"used": 5.0, "read_bytes": 8.0, "degraded": 0.0}, "dir:/x": {"used": 6.0}},
    )
    assert found["headrace:store_write_amplification", ()] == 1.5
    assert found["headrace:store_written_bytes_total", ()] == 300
    assert found["headrace:store_decisions_total", (("tiers", "all"),)] == 7
    assert found["headrace:store_tier_used", (("tier", "dir:/x"),)] == 6
    assert found["headrace:store_tier_read_bytes_total", (("tier", "memory"),)] == 8


def test_sources_reach_the_meter_through_merged_deltas() -> None:
    first = TextDelta(0, "a", [1], prompt_tokens=9, cached_tokens=8, cached_by_source={"pool": 3, "memory": 5})
    later = TextDelta(0, "b", [2], prompt_tokens=9, cached_tokens=8)
    other = TextDelta(0, "c", [3], prompt_tokens=4, cached_tokens=2, cached_by_source={"pool": 2})
    meter = Meter(Metrics("m"))
    meter.see([(0, merge([first, later])), (1, other)])
    assert meter.cached_by_source == {"pool": 5, "memory": 5}
    assert sum(meter.cached_by_source.values()) == meter.cached_tokens


def test_a_delta_says_where_cached_tokens_came_from() -> None:
    delta = Delta("a", [1], cached_tokens=8, cached_by_source={"pool": 8})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta) == delta
