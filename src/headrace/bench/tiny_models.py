"""Tiny models with random weights, one for each family that must work, written as a folder like a downloaded one."""

from pathlib import Path
from typing import Any

VOCABULARY = 307
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    # Wide enough that the next token depends on the whole context; the usual 0.02 makes near ties of everything.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}

#: Family -> (Transformers configuration class, its own settings).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "smollm": ("LlamaConfig", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1,
                               "hidden_size": 96}),
    "mistral": ("MistralConfig", {"sliding_window": 40}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 40, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 40, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def save(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a model of the family, fp32, into `folder`; the same seed gives the same weights.

    Args:
        family: a key of `FAMILIES`.
        folder: made if it is not there.
        seed: of the weights.
        overrides: settings that win over the family's, e.g. `num_hidden_layers`.
    """
    import torch
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    kind, own = FAMILIES[family]
    config = getattr(transformers, kind)(**{**_COMMON, **own, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:  # norms start at one and biases at zero, which would hide how they are applied
                    weight.add_(torch.randn_like(weight) * 0.1)
        model.save_pretrained(folder)
    return folder
