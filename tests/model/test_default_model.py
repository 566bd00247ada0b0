"""The default model as it stands in the cache (fetched first where it is not)."""

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from headrace.model import hub


@pytest.fixture(scope="module")
def folder() -> Path:
    return hub.resolve("default")


def test_weights_are_whole_and_of_plausible_size(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        names = tensors.keys()
        shapes = {name: tensors.get_slice(name).get_shape() for name in names}
        query = tensors.get_tensor("model.layers.0.self_attn.q_proj.weight")
    assert sum(math.prod(shape) for shape in shapes.values()) == 134_515_008  # SmolLM2-135M, tied embeddings
    assert "lm_head.weight" not in shapes
    assert str(query.dtype) == "torch.float32"
    assert 0.01 < float(query.std()) < 1


def test_tokens_and_template_are_those_of_the_model(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    # Digits stand alone, and the spaces before them stay together: the family's own splitting.
    assert [tokenizer.decode(token) for token in tokenizer("x   2024").input_ids] == ["x", "   ", "2", "0", "2", "4"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert (generation["temperature"], generation["top_p"]) == (0.2, 0.9)
