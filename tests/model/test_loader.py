"""What loading refuses, and how it says so."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import save

from headrace.core.errors import ConfigError, ModelError
from headrace.model.loader import load


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


def _copy(folder: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


_TINY: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek": (
        "DeepseekV3Config",
        {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
         "moe_intermediate_size": 16},
        "multi-head latent attention",
    ),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}, "attention sinks"),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 2}, "ALiBi"),
    "mpt": ("MptConfig", {"d_model": 32, "n_heads": 2, "n_layers": 2}, "ALiBi"),
    "falcon-alibi": ("FalconConfig", {"alibi": True}, "ALiBi"),
    "t5": ("T5Config", {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}, "encoder-decoder"),
    "mamba": ("MambaConfig", {}, "state-space"),
    "qwen3-next": (
        "Qwen3NextConfig",
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]},
        "linear-attention",
    ),
    "gemma3n": ("Gemma3nTextConfig", {"num_kv_shared_layers": 1}, "shares KV"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_refused_by_name(name: str, tmp_path: Path, llama: Path) -> None:
    """By the configuration alone: the weights beside it are another model's and are never read."""
    kind, keywords, part = _REFUSED[name]
    config = getattr(transformers, kind)(**{**_TINY, **keywords})
    shutil.copy(llama / "model.safetensors", tmp_path)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=part) as caught:
        load(tmp_path, threads=1)
    assert "\n" not in str(caught.value)


def test_multimodal_refused(tmp_path: Path, llama: Path) -> None:
    config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**_TINY))
    shutil.copy(llama / "model.safetensors", tmp_path)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="multimodal"):
        load(tmp_path, threads=1)


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        # Neither goes through the attention interface with our keyword, or it hides a mask of its own.
        ("GPTNeoConfig", {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2}),
        ("CodeGenConfig", {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "rotary_dim": 8, "n_ctx": 64}),
    ],
)
def test_probe_refuses_what_the_config_hides(kind: str, keywords: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, kind)(**{**_TINY, **keywords})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path, threads=1)
    assert "\n" not in str(caught.value)


def test_quantised_checkpoint_is_refused_by_its_method(tmp_path: Path, llama: Path) -> None:
    folder = _copy(llama, tmp_path / "q", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    with pytest.raises(ModelError, match="gptq"):
        load(folder, threads=1)


def test_weights_of_another_shape_or_missing(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ModelError, match="_proj"):
        load(_copy(llama, tmp_path / "heads", num_attention_heads=8), threads=1)
    with pytest.raises(ModelError, match="lacks the weight"):
        load(_copy(llama, tmp_path / "layers", num_hidden_layers=6), threads=1)
    with pytest.raises(ModelError, match="does not use"):
        load(_copy(llama, tmp_path / "fewer", num_hidden_layers=3), threads=1)


def test_broken_files(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path, threads=1)
    bad = _copy(llama, tmp_path / "json")
    (bad / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load(bad, threads=1)
    none = _copy(llama, tmp_path / "none")
    (none / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        load(none, threads=1)
    cut = _copy(llama, tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load(cut, threads=1)
    (cut / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load(cut, threads=1)
    shards = _copy(llama, tmp_path / "shards")
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x-1.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks x-1\.safetensors"):
        load(shards, threads=1)
    unknown = _copy(llama, tmp_path / "unknown", model_type="nonesuch")
    with pytest.raises(ModelError, match="nonesuch"):
        load(unknown, threads=1)


def test_wrong_arguments(llama: Path) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        load(llama, dtype="int8", threads=1)
    with pytest.raises(ConfigError, match="device"):
        load(llama, device="tpu", threads=1)
    with pytest.raises(ConfigError, match="512 positions"):
        load(llama, max_model_len=513, threads=1)
    with pytest.raises(ConfigError, match="negative"):
        load(llama, max_model_len=-1, threads=1)
    assert load(llama, max_model_len=100, threads=1).shape.max_position == 100


def test_sharded_checkpoint_and_generation_config(tmp_path: Path, llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    phases: list[tuple[str, float]] = []
    decoder = load(tmp_path, threads=1, progress=lambda phase, done: phases.append((phase, done)))
    assert decoder.shape.eos_ids == (2, 5)
    assert phases[-1] == ("pack", 1.0)
    assert decoder.shape.params == sum(weight.numel() for weight in model.parameters())


def test_peak_memory(tmp_path: Path) -> None:
    """A fresh process loads 210 MB of weights, tied, and stays within the promised 1.3 x weights + 700 MB."""
    folder = save(
        "smollm-tied", tmp_path, vocab_size=20000, hidden_size=512, intermediate_size=1600, num_hidden_layers=14,
        num_attention_heads=8, initializer_range=0.02,
    )  # fmt: skip
    code = (
        "import re, sys; from pathlib import Path; from headrace.model.loader import estimate, load\n"
        "need = estimate(Path(sys.argv[1])); shape = load(Path(sys.argv[1]), threads=1).shape\n"
        # VmHWM, not ru_maxrss: the latter starts with the peak of the process that forked this one.
        "peak = int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) << 10\n"
        "print(peak, shape.params * 4, need.peak_bytes,"
        " need.weight_bytes, shape.weight_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    peak, weights, foreseen, estimated, actual = map(int, done.stdout.split())
    assert weights > 200e6
    assert peak <= 1.3 * weights + 700e6
    assert peak <= foreseen
    assert estimated == actual


def test_sixteen_bit(tmp_path: Path) -> None:
    """bfloat16 and float16 give the float32 model's distribution to their precision, alone and in company."""
    from dense_step import DenseCache, DenseStep

    folder = save("qwen3", tmp_path, initializer_range=0.1)
    tokens = torch.randint(3, 211, (30,), generator=torch.Generator().manual_seed(1))
    results = {}
    for dtype in ("float32", "bfloat16", "float16"):
        decoder = load(folder, dtype=dtype, threads=1)
        assert decoder.shape.dtype == dtype
        fwd = decoder.begin(tokens, torch.arange(30), DenseStep(DenseCache(), [(0, 30)]))
        decoder.run(fwd, 0, 4)
        assert str(fwd.hidden.dtype) == f"torch.{dtype}"
        results[dtype] = decoder.logits(fwd, torch.arange(30)).log_softmax(-1)
    scale = results["float32"].std()
    assert (results["bfloat16"] - results["float32"]).abs().mean() < 0.03 * scale
    assert (results["float16"] - results["float32"]).abs().mean() < 0.005 * scale
