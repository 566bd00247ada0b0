"""Rotary frequencies that would depend on the longest sequence of a step are fixed for the life of an engine."""

from typing import Any

from torch import nn

from headrace.core.errors import ModelError

#: Types whose frequencies never change with length.
_STATIC = frozenset({"default", "linear", "yarn", "llama3", "proportional"})


def freeze(model: nn.Module, config: Any, max_model_len: int) -> str:
    """Fix the frequencies of every rotary module for sequences of up to `max_model_len` tokens.

    Transformers' longrope picks the long factors, and its dynamic type the base, from the longest position in the
    step, so that a neighbour in the batch would change a request's numbers, and with them its cached KV.

    Returns what was fixed, as text for the fingerprint; empty where nothing depends on length.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fixed = []
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None or not hasattr(module, "config"):
            continue
        if isinstance(kinds, dict):
            strange = {kind for kind in kinds.values() if kind not in _STATIC}
            if strange:
                raise ModelError(f"RoPE type {sorted(strange)[0]!r} per layer type is not supported")
            continue
        if kinds in _STATIC:
            continue
        if kinds not in ("longrope", "dynamic"):
            raise ModelError(f"RoPE type {kinds!r} is not supported")
        parameters = config.rope_parameters
        original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_model_len > original:
            # What Transformers computes for a row that reaches this length.
            length = original + 1 if kinds == "longrope" else max_model_len
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kinds](config, module.inv_freq.device, seq_len=length)
            module.inv_freq.copy_(frequencies)
            if kinds == "dynamic":
                module.attention_scaling = scaling
        else:
            length = 0
        module.rope_type = "default"
        fixed.append(f"{name}:{kinds}:{length}")
    return ";".join(fixed)
