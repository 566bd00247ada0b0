"""What Transformers 5.24 loses of a GGUF file, put right; and checks that the result is sound.

Used by the converter's child process, which has torch.
"""

import json
from pathlib import Path
from typing import Any

from headrace.core.errors import ModelError
from headrace.model.gguf_header import read_header

_INDIVIDUAL_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2_SPLIT = {"gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"}
_USER_DEFINED = 4  # llama.cpp's type of such a token
_ROUND_TRIPS = ("Hello, world!", "I'm the 1st of  1024\n\n\tlines.", "naïve façade: 日本語 \U0001f600")


def read_metadata(source: Path) -> dict[str, Any]:
    """What the GGUF file says of itself: the keys the repairs need.

    Raises:
        ModelError: it is no whole GGUF file, or holds no language model.
    """
    header = read_header(source)
    found = header.metadata
    architecture, tokens = found.get("general.architecture"), found.get("tokenizer.ggml.tokens")
    if architecture is None or not tokens:
        raise ModelError(f"{source.name} holds no language model: it names no architecture or has no vocabulary")
    kinds = found.get("tokenizer.ggml.token_type", [])
    return {
        "architecture": architecture,
        "parameters": header.parameters,
        "tokenizer": found.get("tokenizer.ggml.model"),
        "pre": found.get("tokenizer.ggml.pre"),
        "user_defined": {
            token: text for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _USER_DEFINED
        },
        "template": found.get("tokenizer.chat_template"),
        "context": found.get(f"{architecture}.context_length"),
        # A chat model ends a turn with another token than a text (Llama 3: <|eot_id|>); both end a generation.
        "ends": [
            int(token)
            for key in ("eos", "eot", "eom")
            if (token := found.get(f"tokenizer.ggml.{key}_token_id")) is not None
        ],
    }


def repair_config(model: Any, metadata: dict[str, Any]) -> None:
    """Take out what ties the config to the GGUF file; undo the rounding of floats; set all tokens that end a turn."""
    config = model.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    config.__dict__.pop("_model_name_or_path", None)  # the GGUF file's general.name
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    for name, value in config.to_dict().items():
        if isinstance(value, float):
            setattr(config, name, _shortest_float32(value))
    if metadata["ends"]:
        ends = list(dict.fromkeys(metadata["ends"]))
        config.eos_token_id = ends[0]
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]


def _shortest_float32(value: float) -> float:
    """1e-05 for the 9.999999747378752e-06 that 1e-05 becomes in a GGUF file's 32 bits."""
    import numpy

    return float(str(numpy.float32(value))) if float(numpy.float32(value)) == value else value


def check_splitting(metadata: dict[str, Any], name: str) -> None:
    """Refuse a byte-level vocabulary whose way of splitting text neither we nor Transformers know.

    Raises:
        ModelError: the vocabulary is one.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    known = _INDIVIDUAL_DIGITS | _GPT2_SPLIT | set(GGUF_PRE_TOKENIZER_SPLITS)
    if metadata["tokenizer"] == "gpt2" and metadata["pre"] not in known:
        raise ModelError(
            f"{name}: the tokenizer's way of splitting text ({metadata['pre']!r}) is not known, so its tokens would be "
            "wrong; use the safetensors folder of this model"
        )


def repair_tokenizer(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Give a byte-level vocabulary the splitting it was trained with, and the chat template of the file.

    The file names the splitting in `tokenizer.ggml.pre`. Transformers 5.24 knows some names and treats the
    others as GPT-2's, which for instance cuts "  12" of the SmolLM family differently from its training.
    """
    from tokenizers import pre_tokenizers

    if metadata["tokenizer"] == "gpt2" and metadata["pre"] in _INDIVIDUAL_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if metadata["tokenizer"] == "gpt2":
        _add_user_defined(tokenizer, metadata["user_defined"])
    if not tokenizer.chat_template and metadata["template"]:
        tokenizer.chat_template = metadata["template"]
    if metadata["context"]:
        tokenizer.model_max_length = int(metadata["context"])
    tokenizer.clean_up_tokenization_spaces = False


def _add_user_defined(tokenizer: Any, tokens: dict[int, str]) -> None:
    """Make tokens that the file lists as user-defined match whole in a text, under their own spelling.

    Transformers 5.24 spells those with characters outside the byte alphabet (runs of spaces, "<tool call>") in it and
    then finds them no more, so their text was cut into other tokens than in training.
    """
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    known = {entry["id"] for entry in state["added_tokens"]}
    missing = {token: text for token, text in tokens.items() if token not in known}
    if not missing:
        return
    vocab = {missing.get(token, text): token for text, token in state["model"]["vocab"].items()}
    state["model"]["vocab"] = vocab
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    state["added_tokens"] += [{"id": token, "content": text, **flags} for token, text in missing.items()]
    state["added_tokens"].sort(key=lambda entry: entry["id"])
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


def check_model(model: Any, name: str) -> None:
    """Every tensor is there and finite, and the output head is tied exactly where the config says so.

    Raises:
        ModelError: the file `name` is damaged or was misread.
    """
    import torch

    for key, tensor in model.state_dict().items():
        if tensor.is_meta or not torch.isfinite(tensor).all():
            raise ModelError(f"{name}: tensor {key} is missing or not finite; the file is damaged, fetch it again")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if bool(model.config.tie_word_embeddings) != tied:
        raise ModelError(f"{name}: config and weights disagree on tied embeddings; Transformers misread the file")


def check_tokenizer(tokenizer: Any, config: Any, name: str) -> None:
    """The tokenizer fits the embeddings, gives back what it is given, and there is a token to end with.

    Raises:
        ModelError: it does not.
    """
    if len(tokenizer) > config.vocab_size:
        raise ModelError(f"{name}: {len(tokenizer)} tokens but only {config.vocab_size} rows of embeddings")
    for text in _ROUND_TRIPS:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            raise ModelError(f"{name}: the converted tokenizer turns {text!r} into {back!r}")
    ends = [config.eos_token_id] if isinstance(config.eos_token_id, int) else list(config.eos_token_id or [])
    if not ends or not all(0 <= token < config.vocab_size for token in ends):
        raise ModelError(f"{name}: no valid end-of-sequence token (got {config.eos_token_id!r})")
