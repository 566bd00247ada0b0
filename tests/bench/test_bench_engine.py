import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from perf_examples import profile

from headrace.bench import calibrate, plot, sampling, throughput
from headrace.bench.local_engine import LocalEngine, model_folder, tokenizer_of, with_cache, with_scheduler
from headrace.bench.parity_prompts import random_prompts
from headrace.bench.peers import CommandPeer, TransformersPeer
from headrace.bench.workload import Item, items, read_requests, write_requests
from headrace.cli import main
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.errors import ConfigError, HeadraceError
from headrace.perf.profile import available_cores, cpu_name, load, save
from headrace.perf.roofline import roofline_seconds, work_of
from homes import fresh_home


@pytest.fixture
def config(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("HEADRACE_HOME", str(fresh_home(tmp_path / "home")))
    return with_cache(EngineConfig(model=ModelConfig(model=str(tiny))), kv_memory=8 << 20)


def batch(outputs: int = 5) -> list[Item]:
    document = list(range(100, 150))
    return items([([*document, 7 + i], outputs) for i in range(4)] + [([9, 8, 7], outputs)])


def test_a_batch_runs_and_is_counted(config: EngineConfig) -> None:
    engine = LocalEngine(with_scheduler(config, max_queue=2))  # the batch is larger than the queue
    finished: list[int] = []
    run = engine.run(batch(), advance=finished.append)
    assert sum(finished) == 5
    assert {name: len(tokens) for name, tokens in run.outputs.items()} == {f"r{i}": 5 for i in range(5)}
    assert (run.prompt_tokens, run.output_tokens) == (4 * 51 + 3, 25)
    assert run.steps >= 5
    assert run.hit_tokens >= 48
    assert run.total_tokens_per_s == pytest.approx(232 / run.wall_s)


def test_salts_keep_rounds_cold(config: EngineConfig) -> None:
    engine = LocalEngine(config)
    first, warm, cold = (engine.run(batch(), salt=salt) for salt in ("a", "a", "b"))
    assert first.outputs == warm.outputs == cold.outputs
    assert warm.hit_tokens > first.hit_tokens
    assert cold.hit_tokens == first.hit_tokens


def test_throughput_beside_peers(config: EngineConfig, tiny: Path, tmp_path: Path) -> None:
    cores = available_cores()
    known = profile(device_name=cpu_name(), threads=cores, cores=cores)
    save(known)
    engine = LocalEngine(config)
    work = batch()
    file = tmp_path / "requests.jsonl"
    write_requests(work, file)
    script = (
        "import json, sys; n = len(open(sys.argv[1]).readlines()); print('log');"
        "print(json.dumps({'peer': 'other', 'wall_s': 2.0, 'total_tokens_per_s': n * 10}))"
    )
    peers = [
        TransformersPeer(tiny, "float32", work),
        CommandPeer(f'{sys.executable} -c "{script}" {{requests}}', file),
    ]
    result = throughput.measure(engine, work, peers, rounds=2)
    summary = result.summary()
    assert set(summary) >= {
        "wall_s", "total_tokens_per_s", "output_tokens_per_s", "steps", "hit_tokens", "peak_rss_mb", "roofline_s",
        "roofline_share",
    }  # fmt: skip
    assert summary["rounds"] == 2
    assert result.roofline_s == roofline_seconds(
        work_of([item.prompt for item in work], [5] * 5, engine.shape), engine.shape, known
    )
    wall = median(run.wall_s for run in result.ours)
    assert summary["wall_s"] == round(wall, 3)
    assert summary["roofline_share"] == round(result.roofline_s / wall, 4)
    assert summary["other_total_tokens_per_s"] == 50
    assert summary["speedup_over_other"] == pytest.approx(summary["total_tokens_per_s"] / 50, rel=0.01)
    assert summary["transformers_total_tokens_per_s"] > 0
    assert result.ours[0].hit_tokens == result.ours[1].hit_tokens
    throughput.write_outputs(work, result.ours[0], tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [item.custom_id for item in work]
    assert all(len(line["token_ids"]) == 5 for line in lines)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("{python} -c 'import sys; sys.exit(\"no luck\")'", "code 1: no luck"),
        ("{python} -c 'print(1)'", "printed no JSON line"),
    ],
)
def test_a_peer_that_fails_is_told(command: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=message):
        CommandPeer(command.replace("{python}", sys.executable), tmp_path / "r").run()
    with pytest.raises(ConfigError):
        CommandPeer("'", tmp_path / "r")


def test_the_command_prints_one_json_object(
    config: EngineConfig, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "requests.jsonl"
    lines = [
        {"custom_id": "text", "url": "/v1/completions", "body": {"prompt": "the fox", "max_tokens": 3}},
        {
            "custom_id": "chat",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 3, "ignore_eos": True},
        },
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    picture, out = tmp_path / "p.png", tmp_path / "o.jsonl"
    words = ["bench", "throughput", str(tiny), "--requests", str(file), "--kv-memory", "8MiB", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--outputs", str(out), "--plot", str(picture)])
    assert ended.value.code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["output_tokens"] >= 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["custom_id"] for line in out.read_text().splitlines()] == ["text", "chat"]


def test_chat_prompts_go_through_the_models_own_template(config: EngineConfig, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(model_folder(config))
    file = tmp_path / "r.jsonl"
    body = {"messages": [{"role": "user", "content": "the fox"}]}
    file.write_text(json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body}))
    (item,) = read_requests(file, lambda: tokenizer)
    assert tokenizer.decode(item.prompt) == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"


def test_sampling_is_compared_with_greedy(config: EngineConfig) -> None:
    result = sampling.measure(LocalEngine(config), sequences=4, outputs=4, rounds=2).summary()
    assert result["rounds"] == 2
    assert result["overhead"] == pytest.approx(
        1 - result["sampled_tokens_per_s"] / result["greedy_tokens_per_s"], abs=0.01
    )


def test_calibration_gives_a_profile_that_is_used(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command with fewer points and smaller memory, so that it takes seconds."""
    monkeypatch.setattr(calibrate, "GEMM_ROWS", (1, 64))
    monkeypatch.setattr(calibrate, "_LAYERS", 2)
    monkeypatch.setattr(calibrate, "_SUM_BYTES", 16_000_000)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "calibrate", "--threads", "1", "--json", "--plot", str(tmp_path / "g.svg")])
    assert ended.value.code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    measured = load(Path(result["profile"]))
    assert (measured.device, measured.threads, measured.dtype, measured.measured) == ("cpu", 1, "float32", True)
    assert 1e8 < measured.gemm_rate(64) < 1e13
    assert 1e8 < measured.sum_read < 1e12
    assert 1e7 < measured.kv_read < 1e12
    assert measured.step_overhead > 0
    assert (tmp_path / "g.svg").exists()
    one_thread = replace(config, model=replace(config.model, threads=1))
    engine_info: Any = LocalEngine(one_thread).info
    assert calibrate.roofline_profile(engine_info, one_thread) == measured


def test_pictures(tmp_path: Path) -> None:
    plot.bars({"a": [1.0, 2.0], "b": [3.0]}, "tokens/s", "title", tmp_path / "b.png")
    plot.distributions({"TTFT": [0.1, 0.2], "ITL": [0.05]}, tmp_path / "d.png")
    assert (tmp_path / "b.png").stat().st_size > 1000
    assert (tmp_path / "d.png").stat().st_size > 1000


def test_the_work_of_a_step_is_spread_over_its_time() -> None:
    # Steps of 2 s and 1 s with a second between them; the first computes all the time, the second half of it.
    ends, lengths, work = np.array([2.0, 4.0]), np.array([2.0, 1.0]), np.array([2.0, 0.5])
    shares = plot.per_second(ends, lengths, work, np.linspace(0, 4, 9))
    assert shares == pytest.approx([1, 1, 1, 1, 0, 0, 0.5, 0.5])


def test_random_prompts_avoid_special_tokens() -> None:
    assert all(3 <= token < 20 for item in random_prompts(20, (50, 50), 1) for token in item.prompt)


def test_decode_and_prompt_rows_in_one_step(
    config: EngineConfig, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(profile(device_name=cpu_name(), threads=available_cores(), cores=available_cores()))
    words = ["bench", "mixed-steps", "--model", str(tiny), "--mix", "3+8", "--mix", "2+40", "--context", "20"]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--rounds", "2", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [(mix["decode_rows"], mix["prompt_rows"]) for mix in told["mixes"]] == [(3, 8), (2, 40)]
    assert told["overlap"] is False
    for mix in told["mixes"]:
        assert mix["together_over_longer"] == pytest.approx(
            mix["together_ms"] / max(mix["decode_ms"], mix["prompt_ms"]), rel=0.2
        )
        assert 0 < mix["predicted_over_sum"] < 1
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "mixed-steps", "--model", str(tiny), "--mix", "2+9999"])
    assert "--max-num-batched-tokens" in capsys.readouterr().err
