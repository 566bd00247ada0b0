"""A prompt asked again after a restart, over a tiny model and real servers."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench.disk import drop_page_cache, read_rate
from headrace.bench.local_engine import with_cache
from headrace.bench.restore import measure, summary
from headrace.bench.store_chunks import scratch_tiers, write_chunks
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.errors import ConfigError
from headrace.store.layout import KVLayout
from headrace.store.tiers.faulty import Fault, FaultPlan, FaultyTier
from headrace.store.tiers.tier import TierError
from homes import fresh_home


@pytest.fixture
def config(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("HEADRACE_HOME", str(fresh_home(tmp_path / "home")))
    return with_cache(EngineConfig(model=ModelConfig(model=str(tiny))), kv_memory=32 << 20)


def with_tiers(config: EngineConfig, *tiers: str) -> EngineConfig:
    return replace(config, store=replace(config.store, tier=tiers))


def test_a_prompt_comes_back_after_a_restart(config: EngineConfig, tmp_path: Path) -> None:
    rounds = measure(with_tiers(config, f"dir:{tmp_path / 't'}:64MiB"), prompt_tokens=700, outputs=60, rounds=1)
    result = summary(rounds)
    assert result["same_text"]
    assert result["bytes_as_needed"]
    # Five full chunks of 128 tokens: 2 layers, K and V, 2 heads, 16 elements of 4 bytes, and a header each.
    assert result["kv_bytes"] == result["bytes_read"] == 5 * (4096 + 2 * 2 * 2 * 128 * 16 * 4)
    assert result["cached_tokens"] == 640
    assert result["limit_s"] == pytest.approx(1.3 * result["disk_s"] + 2 * result["decode_step_s"], abs=1e-3)
    assert 0 < result["ttft_warm_s"] < 60
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.parametrize("tiers", [("memory:64MiB",), ("dir:/tmp/a:64MiB", "dir:/tmp/b:64MiB")])
def test_only_one_folder_is_restored_from(config: EngineConfig, tiers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="not one folder"):
        measure(with_tiers(config, *tiers))


def test_the_rate_of_a_tier_alone(tmp_path: Path) -> None:
    layout = KVLayout("be" * 32, layers=4, kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=64)
    with scratch_tiers([f"throttled:10MB/s:dir:{tmp_path}:8MiB"]) as tiers:
        write_chunks(tiers, layout, 16)
        drop_page_cache(tmp_path)
        parts = list(tiers[0].scan())
        assert 5e6 < read_rate(tiers[0], parts, unit_bytes=8192) <= 10.1e6


def test_a_tier_that_fails_has_no_rate(tmp_path: Path) -> None:
    layout = KVLayout("be" * 32, layers=4, kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=64)
    with scratch_tiers([f"dir:{tmp_path}:8MiB"]) as tiers:
        write_chunks(tiers, layout, 4)
        broken = FaultyTier(tiers[0], FaultPlan(rates={Fault.READ_ERROR: 1.0}))
        with pytest.raises(TierError):
            read_rate(broken, list(tiers[0].scan()))
