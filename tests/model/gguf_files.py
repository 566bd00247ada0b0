"""A tiny Llama-like model as a GGUF file, quantised as the default model is, and the same weights in Transformers."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vocabularies import TEMPLATE, byte_level

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=byte_level().get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )


def write(path: Path, pre: str = "smollm") -> LlamaForCausalLM:
    """Write the file; returns the model whose weights are what its quantised tensors stand for."""
    torch.manual_seed(0)
    shape = config()
    model = LlamaForCausalLM(shape).eval()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_chat_template(TEMPLATE)
    _write_vocabulary(writer, pre)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue
        target, quantised = _place(name)
        values = tensor.numpy()
        if target.endswith(("attn_q.weight", "attn_k.weight")):
            heads = shape.num_attention_heads if "attn_q" in target else shape.num_key_value_heads
            values = _interleave(values, heads)
        if quantised is None:
            writer.add_tensor(target, values)
            continue
        packed = gguf.quants.quantize(values, quantised)
        writer.add_tensor(target, packed, raw_dtype=quantised)
        meant = gguf.quants.dequantize(packed, quantised)
        if target.endswith(("attn_q.weight", "attn_k.weight")):
            meant = _interleave(meant, heads, back=True)
        tensor.copy_(torch.from_numpy(meant))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    tokenizer = byte_level()
    state = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {entry["content"]: entry["special"] for entry in state["added_tokens"]}
    kinds = [
        gguf.TokenType.NORMAL
        if token not in special
        else gguf.TokenType.CONTROL
        if special[token]
        else gguf.TokenType.USER_DEFINED
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def _place(name: str) -> tuple[str, gguf.GGMLQuantizationType | None]:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight", gguf.GGMLQuantizationType.Q8_0
    if name == "model.norm.weight":
        return "output_norm.weight", None
    _, _, layer, *inner, kind = name.split(".")
    target = NAMES[".".join(inner)]
    return f"blk.{layer}.{target}.{kind}", None if "norm" in target else gguf.GGMLQuantizationType.Q4_1


def _interleave(values: np.ndarray, heads: int, back: bool = False) -> np.ndarray:
    """GGUF stores the two halves of a rotary head pairwise; rows of [heads x 2 x half, in]."""
    rows, columns = values.shape
    half = rows // heads // 2
    split = (heads, half, 2, columns) if back else (heads, 2, half, columns)
    return np.ascontiguousarray(values.reshape(split).swapaxes(1, 2).reshape(rows, columns))
