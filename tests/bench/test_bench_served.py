"""Measurements that start a real server as a process of its own, over a tiny model."""

from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import headrace

from headrace.bench import batch_online, latency, step
from headrace.bench.local_engine import with_cache, with_scheduler
from headrace.bench.server_process import ServerFailed, free_port, running_server
from headrace.core.config import Config, EngineConfig, ModelConfig, ServerConfig
from homes import fresh_home


@pytest.fixture
def config(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("HEADRACE_HOME", str(fresh_home(tmp_path)))
    return with_cache(EngineConfig(model=ModelConfig(model=str(tiny))), kv_memory=32 << 20)


def test_decode_steps_alone_and_served(config: EngineConfig) -> None:
    result = step.measure(config, clients=3, outputs=150, rounds=1).summary()
    assert result["clients"] == 3
    assert 0 < result["in_process_step_ms"] < 1000
    assert 0 < result["served_step_ms"] < 1000
    assert result["ratio"] == pytest.approx(result["served_step_ms"] / result["in_process_step_ms"], rel=0.05)


def test_a_long_prompt_beside_a_user(config: EngineConfig) -> None:
    result = latency.measure(with_scheduler(config, itl_target=0.05), prompt_tokens=600, rounds=1, vocabulary=400)
    assert result["itl_target_ms"] == 50
    assert result["user_gaps"] > 0
    assert result["ttft_ratio"] == pytest.approx(result["beside_ttft_s"] / result["idle_ttft_s"], rel=0.2)
    assert result["user_itl_p50_ms"] <= result["user_itl_p99_ms"] <= result["user_itl_max_ms"]


def test_online_requests_beside_a_batch(config: EngineConfig) -> None:
    load = batch_online.Load(requests=4, rate=16.0, prompt_tokens=60, output_tokens=4, vocabulary=400)
    result = batch_online.measure(config, load, rounds=1, settle_s=0.2, mixes=30)  # many times what is done meanwhile
    assert result["online_requests"] == 4
    assert 0 <= result["idle_ttft_p50_s"] <= result["idle_ttft_p90_s"]
    assert result["ttft_p90_ratio"] > 0
    assert result["batch_alone_tokens_per_s"] >= 0
    assert result["within_bound"] in (True, False)


def test_a_server_that_cannot_start_says_why(config: EngineConfig) -> None:
    broken = replace(config, model=replace(config.model, model="/nowhere"))
    with (
        pytest.raises(ServerFailed, match="no such file or folder: /nowhere"),
        running_server(Config(broken, replace(ServerConfig(), port=free_port()))),
    ):
        pass


def test_chat_brings_its_own_server(tiny: Path, tmp_path: Path) -> None:
    words = ["chat", str(tiny), "--kv-memory", "8MiB", "--max-tokens", "5", "--temperature", "0"]
    done = headrace(*words, home=tmp_path, stdin="the fox\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
