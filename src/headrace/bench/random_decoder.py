"""A decoder with random weights made where it runs: a large model without its files."""

from typing import Any

import torch

from headrace.model import attention, rope
from headrace.model.decoder import Decoder, find_layers
from headrace.model.probe import probe
from headrace.model.shape import count_experts, count_shape

#: The dense part of an 8-billion-parameter Llama 3.
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def layers_that_fit(config: dict[str, Any], itemsize: int, free: int, share: float = 0.4) -> int:
    """Most layers of a Llama configuration, up to its own, whose weights take a share of `free` bytes; at least 1."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    outside = 2 * config["vocab_size"] * hidden
    fit = int((free * share / itemsize - outside) // layer)
    return max(1, min(int(config["num_hidden_layers"]), fit))


def random_llama(config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Decoder:
    """A Llama; `config`: keywords of Transformers' `LlamaConfig`, such as `LLAMA_8B`."""
    import transformers

    return random_decoder(transformers.LlamaConfig(**config), dtype, device)


def random_decoder(settings: Any, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder of a Transformers configuration. Its modules stay Transformers' own, as on CUDA, on CPU too."""
    import transformers

    attention.register()
    extra = {"experts_implementation": "grouped_mm"} if count_experts(settings) else {}
    with torch.random.fork_rng(), device:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            settings, dtype=dtype, attn_implementation=attention.NAME, **extra
        )
    model = model.eval().requires_grad_(False)
    longest = int(settings.max_position_embeddings)
    rope.freeze(model, settings, longest)
    owner, _ = find_layers(model)
    decoder = Decoder(model, owner)
    calls = probe(decoder)
    decoder.shape = count_shape(model, decoder.layers, settings, calls, longest, (), "random", packed=False)
    decoder.shorten()
    return decoder
