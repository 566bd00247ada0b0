"""Tiny random-weight models of every family that must work, saved as a folder like a downloaded one."""

from pathlib import Path
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 128,
}

#: name -> (configuration class, keywords over the common ones).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 32, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    "smollm-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}),
    "opt": ("OPTConfig", {"ffn_dim": 112, "word_embed_proj_dim": 64}),
    "opt-350m": ("OPTConfig", {"ffn_dim": 112, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {"sliding_window": 11}),
    "phi3-partial": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "phi3-longrope": ("Phi3Config", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 128}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_MOE, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    ),
    "olmo2": ("Olmo2Config", {}),
    # Rotary in the interleaved convention; layers without rotary: what must not be fused.
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 1, 1, 0]}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
}


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write the family's model into `folder` and return it. Norms and biases are random too, not all ones or zeros."""
    import transformers

    kind, keywords = FAMILIES[name]
    config = getattr(transformers, kind)(**{**_COMMON, **keywords, **overrides})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


def reference_logits(
    folder: Path, sequences: list[list[int]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Plain Transformers, eager attention: logits [T, vocab] float32 of each sequence alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0].float() for tokens in sequences]
