"""The layer pipeline over a tiny model: KV comes from where it should, and layers in order."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.bench.pipeline import measure
from headrace.cli import main
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.errors import ConfigError
from homes import fresh_home


@pytest.fixture
def config(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("HEADRACE_HOME", str(fresh_home(tmp_path)))
    return EngineConfig(model=ModelConfig(model=str(tiny)))


def test_rounds_load_compute_and_do_both(config: EngineConfig) -> None:
    result = measure(config, prefix_chunks=3, suffix_tokens=300, rounds=2)
    summary = result.summary()
    # 3 chunks of 128 tokens: 2 layers, K and V, 2 heads, 16 elements of 4 bytes, and a header each.
    assert summary["kv_bytes"] == 3 * (4096 + 2 * 2 * 2 * 128 * 16 * 4)
    assert len(result.rounds) == 2
    for one in result.rounds:
        # The tier gives no more than its bandwidth, alone and beside the computation.
        assert min(one.load.seconds, one.both.seconds) > 0.8 * result.kv_bytes / result.bandwidth
        assert len(one.load.arrived) == len(one.both.arrived) == len(one.both.attended) == 2
        assert one.compute.arrived == ()
        for times in (one.load.arrived, one.both.attended, one.compute.attended):
            assert all(before <= after for before, after in pairwise(times))
        # No layer is attended to before it has come.
        assert all(came < went for came, went in zip(one.both.arrived, one.both.attended, strict=True))
    assert summary["ratio_to_sum"] < summary["ratio_to_max"]


def test_only_one_tier_is_throttled(config: EngineConfig) -> None:
    tiers = ("memory:64MiB", "dir:/tmp/a:64MiB")
    with pytest.raises(ConfigError, match="several"):
        measure(replace(config, store=replace(config.store, tier=tiers)))


def test_the_command_draws_and_prints(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "layers.png"
    words = ["--prefix-chunks", "2", "--suffix-tokens", "280", "--rounds", "1", "--plot", str(picture), "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "pipeline", str(tiny), "--tier", f"dir:{tmp_path / 't'}:64MiB", *words])
    assert ended.value.code in (0, None)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["rounds"] == 1
    assert result["bound"] == 1.15
    assert picture.stat().st_size > 10_000
    assert list((tmp_path / "t").iterdir()) == []
