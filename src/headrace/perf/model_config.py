"""The numbers of a model from its configuration alone: no weights, no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.errors import ModelError
from headrace.perf.model_shape import ModelShape

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_UNGATED = frozenset({"opt", "gpt2", "gptj", "gpt_neox", "phi", "falcon"})  # an MLP of two matrices, not three

#: Configurations of models that papers measure with, so that they can be planned for without their files.
PRESETS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    },
    "llama-3-70b": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    },
    "qwen-2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "torch_dtype": "bfloat16",
    },
    "qwen-2.5-72b": {
        "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064, "torch_dtype": "bfloat16",
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "torch_dtype": "bfloat16",
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def preset(name: str, dtype: str | None = None) -> ModelShape | None:
    """The shape of one of `PRESETS`; None if it is none of them."""
    config = PRESETS.get(name.lower())
    return None if config is None else shape_of(config, dtype)


def longest_context(positions: int | None, rope: Mapping[str, Any] | None) -> int:
    """Tokens that a decoder supports; 0 where its configuration does not say.

    Args:
        positions: `max_position_embeddings` of a Transformers configuration.
        rope: its `rope_parameters`, or what older ones call `rope_scaling`.
    """
    rope, longest = rope or {}, int(positions or 0)
    dynamic = "dynamic" in (rope.get("rope_type"), rope.get("type"))
    return int(longest * rope.get("factor", 1.0)) if dynamic else longest


def shape_of_folder(folder: Path, dtype: str | None = None, kv_dtype: str | None = None) -> ModelShape:
    """The shape of the model in a folder, from its `config.json`.

    Raises:
        ModelError: there is no configuration, or it lacks a number.
    """
    path = folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return shape_of(config, dtype, kv_dtype)


def shape_of(config: Mapping[str, Any], dtype: str | None = None, kv_dtype: str | None = None) -> ModelShape:
    """The shape of a decoder with this Transformers configuration.

    Args:
        config: as in `config.json`; of a model of several parts, that of the text.
        dtype: of weights and computation; None: the checkpoint's.
        kv_dtype: of stored KV; None: as `dtype`.

    Raises:
        ModelError: a number is missing.
    """
    config = config.get("text_config") or config

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            raise ModelError(f"the model's configuration has no {names[0]}; its cost cannot be computed")
        return default

    hidden = number("hidden_size", "n_embd")
    layers = number("num_hidden_layers", "n_layer")
    heads = number("num_attention_heads", "n_head")
    head_dim = number("head_dim", default=hidden // heads)
    query_width, kv_width = heads * head_dim, number("num_key_value_heads", default=heads) * head_dim
    inner = number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    matrices = 2 if config.get("model_type") in _UNGATED else 3
    experts = number("num_local_experts", "num_experts", default=0)
    active = number("num_experts_per_tok", default=0) if experts else 0
    attention = hidden * (query_width + 2 * kv_width) + query_width * hidden
    if experts:
        inner = number("moe_intermediate_size", default=inner)
    expert = matrices * hidden * inner
    mlp = active * expert + hidden * experts if experts else expert  # a router scores every expert
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    itemsize = _itemsize(dtype or stored)
    window, window_layers = _windows(config, layers)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        intermediate=inner * max(1, active),
        linear_params=layers * (attention + mlp),
        head_params=hidden * number("vocab_size"),
        query_width=query_width,
        kv_width=kv_width,
        weight_itemsize=itemsize,
        kv_itemsize=_itemsize(kv_dtype) if kv_dtype else itemsize,
        window=window,
        window_layers=window_layers,
        experts=experts,
        experts_per_token=active,
        expert_params=layers * expert if experts else 0,
    )


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Tokens a sliding layer looks back on, and how many layers slide."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or window < 1 or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        sliding = sum(kind == "sliding_attention" for kind in kinds)
        return (window, sliding) if sliding else (0, 0)
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 1:  # every so many-th layer sees all
        return window, layers - layers // pattern
    return window, layers


def _itemsize(dtype: str) -> int:
    if dtype not in _ITEMSIZE:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(_ITEMSIZE)}")
    return _ITEMSIZE[dtype]
