"""What is refused before a weight is read, by name."""

from typing import Any

from headrace.core.errors import ModelError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ALIBI = ("bloom", "mpt")


def check_config(config: Any) -> None:
    """Raise ModelError for a configuration we know we cannot run; the probe at load catches the rest."""
    kind = getattr(config, "model_type", "unknown")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{kind} is an encoder-decoder model; only decoder-only models are supported")
    for part in ("vision_config", "audio_config", "text_config", "thinker_config"):
        if getattr(config, part, None) is not None:
            raise ModelError(
                f"{kind} is a multimodal model ({part}), which is not supported; use its text-only checkpoint"
            )
    if getattr(config, "kv_lora_rank", None):
        raise ModelError(f"{kind} uses multi-head latent attention (kv_lora_rank), which is not supported")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi" or kind in _ALIBI:
        raise ModelError(f"{kind} uses ALiBi position biases, which are not supported")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ModelError(f"{kind} shares KV between layers (num_kv_shared_layers), which is not supported")
    if kind == "gpt_oss":
        raise ModelError(f"{kind} uses attention sinks, which are not supported")
    for key in ("mamba_d_state", "ssm_cfg", "state_size", "linear_num_value_heads", "conv_kernel"):
        if getattr(config, key, None):
            raise ModelError(f"{kind} has state-space or linear-attention layers ({key}), which are not supported")
    strange = set(getattr(config, "layer_types", None) or ()) - {_FULL, _SLIDING}
    if strange:
        raise ModelError(f"{kind} has layers of type {', '.join(sorted(strange))}, which are not supported")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        raise ModelError(f"{kind} attends in both directions; only causal decoders are supported")
