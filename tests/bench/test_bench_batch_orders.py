"""Jobs in several orders on an engine: the mixes, the figures, and that an order changes no output."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.bench import batch_mixes
from headrace.bench.batch_mixes import MIXES, Mix, make_job
from headrace.bench.batch_orders import measure
from headrace.bench.local_engine import LocalEngine, with_cache, with_pool_of
from headrace.core.config import EngineConfig, ModelConfig, StoreConfig
from headrace.core.errors import ConfigError
from headrace.perf.profile import load_or_default
from homes import fresh_home

SMALL = Mix(6, 5, (96, 128), (4, 8), (1, 4), 12, (8, 16), (8, 24))
PEER = (
    "import json, sys; lines = [json.loads(l) for l in open(sys.argv[1])];"
    "print(json.dumps({'peer': 'p', 'wall_s': 2.0, 'total_tokens_per_s': len(lines)}))"
)


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_is_the_same_each_time_and_hides_the_lengths(mix: str) -> None:
    job, again = make_job(mix), make_job(mix)
    assert [item.prompt for item in job.items] == [item.prompt for item in again.items]
    assert len(job.items) >= 400
    limits, lengths = job.requests.max_tokens, np.array(job.lengths)
    assert (lengths <= limits).all()
    assert len(np.unique(limits)) == 2  # by kind, not by request
    assert [item.prompt for item in make_job(mix, seed=1).items] != [item.prompt for item in job.items]
    for number in (0, len(job.items) - 1):
        assert job.requests.prompt(number).tolist() == job.items[number].prompt


def test_a_pool_of_so_many_tokens_goes_by_their_type(tiny: Path) -> None:
    def nbytes(dtype: str, kv_dtype: str) -> int:
        config = EngineConfig(model=ModelConfig(model=str(tiny), dtype=dtype))
        return with_pool_of(with_cache(config, kv_dtype=kv_dtype), 100).cache.kv_memory

    whole = nbytes("auto", "auto")
    assert whole == nbytes("float32", "auto") == nbytes("bfloat16", "float32") > 0
    assert 2 * nbytes("bfloat16", "auto") == 2 * nbytes("float32", "float16") == whole
    assert with_pool_of(with_cache(EngineConfig(), kv_memory=7), 100).cache.kv_memory == 7


def test_an_unknown_mix_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefixes, even, replies"):
        make_job("mixed")


def test_orders_are_measured_in_turn(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(fresh_home(tmp_path)))
    monkeypatch.setitem(batch_mixes.MIXES, "small", SMALL)
    config = EngineConfig(model=ModelConfig(model=str(tiny)), store=StoreConfig(store=False))
    engine = LocalEngine(with_cache(config, kv_memory=1 << 20))
    config = replace(engine.config, scheduler=replace(engine.config.scheduler, max_num_seqs=8))
    engine.config = config
    job = make_job("small", vocab_size=engine.info.vocab_size)
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    command = f"{sys.executable} {script} {{requests}}"
    profile = load_or_default("cpu", 2, "float32")
    result = measure(engine, job, ("fcfs", "dfs", "blend"), command, rounds=2, profile=profile)
    summary = result.summary()
    assert summary["requests"] == len(job.items) == 42
    assert summary["output_tokens"] == sum(job.lengths)
    assert summary["rounds"] == 2
    for order in ("fcfs", "dfs", "blend"):
        runs = result.runs[order]
        assert [len(run.outputs) for run in runs] == [42, 42]
        assert runs[0].output_tokens == sum(job.lengths)
        assert summary["orders"][order]["predicted_s"] > 0
    # Depth first, every prefix is computed once: five of six requests find its whole pages.
    assert result.runs["dfs"][0].hit_tokens >= 6 * 4 * 96
    assert summary["sharing_of_dfs"] > 0.5
    assert summary["over_peer_as_given"] > 0
    assert summary["peer_dfs_s"] == [2.0, 2.0]
