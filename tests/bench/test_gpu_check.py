"""The GPU check where there is no GPU: it says so, and its parts run on CPU in tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench import gpu_check, gpu_parity, gpu_records
from headrace.bench.batch_mixes import MIXES, Mix
from headrace.bench.random_decoder import LLAMA_8B, layers_that_fit
from headrace.bench.tiny_models import save
from headrace.engine.graphs import DecodePath

TINY: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace.bench.gpu_check", "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "no CUDA device is here; this check needs one\n"


def test_its_parts_run_on_cpu(tmp_path: Path) -> None:
    parts = gpu_check.sections(
        tmp_path, "cpu", TINY, TINY, ["gemma2"], threads=1, batches=(1, 3), context=20, prefill=40, steps=1
    )
    chosen = {name: parts[name] for name in ("tiny_logits", "middle_logits", "speed")}
    result = gpu_check.run(chosen, seconds=60)
    assert result["failed"] == result["skipped"] == []
    assert result["holds"]
    assert result["tiny_logits_checks"] == 4  # two types, two ways
    for name in ("decode_1_tokens_per_s", "decode_3_tokens_per_s", "prefill_tokens_per_s", "attention_gb_s"):
        assert result[f"speed_{name}"] > 0
    assert json.loads(json.dumps(result)) == result


def test_orders_are_compared_with_overlap_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXES, "few", Mix(2, 4, (40, 60), (3, 6), (1, 3), 16, (4, 8), (8, 16)))
    folder = save("llama", tmp_path, **TINY)
    found = gpu_check.order_rates(folder, "cpu", TINY["vocab_size"], "few", rounds=1)
    assert all(value > 0 for value in found.values())
    assert {"plain_dfs_s", "plain_blend_s", "overlap_dfs_s", "overlap_blend_s"} < set(found)


def test_records_that_move_are_right() -> None:
    assert gpu_records.check("cpu") == {"save_holds": True, "load_holds": True, "pinned": False}


def test_the_check_can_be_run_as_a_program() -> None:
    source = Path(gpu_check.__file__).read_text()
    assert source.rstrip().endswith("sys.exit(main())"), "what stands behind it is not there yet"


def test_a_stored_prefix_loads_beside_computing(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, **TINY)
    found = gpu_check.pipeline_rates(folder, "cpu", prefix_chunks=2, suffix_tokens=64, rounds=1)
    assert found["both_s"] < 10 * (found["load_s"] + found["compute_s"])
    assert all(value > 0 for value in found.values())


def test_a_wrong_number_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("llama", tmp_path)
    run = DecodePath.run

    def slightly_off(self: DecodePath, batch: Any) -> torch.Tensor:
        logits = run(self, batch)
        logits[0, 5] += 0.01 * logits.std()
        return logits

    monkeypatch.setattr(DecodePath, "run", slightly_off)
    checks = {check.way: check.holds for check in gpu_parity.check("llama", folder, "float32", "cpu", 1)}
    assert checks == {"torch, any plan": True, "torch, fixed shape": False}


def test_a_part_that_fails_is_reported_and_the_others_go_on() -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    result = gpu_check.run({"a": broken, "b": lambda: {"holds": True, "rate": 3}}, seconds=60)
    assert result["failed"] == ["a: RuntimeError: no such kernel"]
    assert result["b_rate"] == 3
    assert not result["holds"]
    late = gpu_check.run({"a": broken}, seconds=-1)
    assert late["skipped"] == ["a"]
    assert not late["holds"]
    wrong = gpu_check.run({"a": lambda: {"holds": False}}, seconds=60)
    assert not wrong["holds"]


def test_the_large_model_fits_the_memory() -> None:
    assert layers_that_fit(LLAMA_8B, 2, 140 << 30) == 32
    assert 1 < layers_that_fit(LLAMA_8B, 2, 16 << 30) < 32
    assert layers_that_fit(LLAMA_8B, 2, 1 << 30) == 1
