"""From a GGUF file to a folder that Transformers, and anything else, can load.

The work is done by a child process (`python -m headrace.model.convert SOURCE TARGET`): it needs torch and the model's
memory, which the caller, often a front process that must stay light, does not keep.

Transformers 5.24 reads weights and shapes from a GGUF file, but some of what it writes back is not what the model was
trained with; `_repair_*` below put that right, and `_check` refuses a result that is not sound.
"""

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.core.errors import ModelError
from headrace.model.progress import Progress, ProgressCallback

CONVERTER = 1
"""Version of this converter: folders made by another one are converted again."""

FLOAT32_LIMIT = 1_500_000_000
"""Models with more parameters than this are written as bfloat16: 32 bits would be six times the GGUF file's size."""

_INDIVIDUAL_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2_SPLIT = {"gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"}
_ROUND_TRIPS = ("Hello, world!", "I'm the 1st of  1024\n\n\tlines.", "naïve façade: 日本語 \U0001f600")

Report = Callable[[int, int], None]


def convert_gguf(source: Path, target: Path, lock: int, progress: ProgressCallback | None = None) -> None:
    """Convert the GGUF file `source` into the empty folder `target`, in a child process that inherits `lock`.

    Writes safetensors (float32; bfloat16 above `FLOAT32_LIMIT` parameters), config, generation config, tokenizer and
    chat template.

    Raises:
        ModelError: the file is damaged, or something in it is not supported (the message names it).
    """
    started = time.monotonic()
    command = [sys.executable, "-m", "headrace.model.convert", str(source), str(target)]
    noise: deque[str] = deque(maxlen=5)
    done = total = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", pass_fds=(lock,)
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                message = _message(line)
                if message is None:
                    if line.strip():
                        noise.append(line.strip())
                elif "error" in message:
                    raise ModelError(message["error"])
                else:
                    done, total = message["done"], message["total"]
                    if progress is not None:
                        progress(Progress("convert", done, total, time.monotonic() - started))
        except BaseException:
            child.terminate()
            raise
    if child.returncode != 0:
        reason = noise[-1] if noise else f"exit status {child.returncode}"
        raise ModelError(f"converting {source.name} failed: {reason}")
    if progress is not None:
        progress(Progress("convert", total, total, time.monotonic() - started, finished=True))


def _message(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"headrace"'):
        return None
    message: dict[str, Any] = json.loads(line)["headrace"]
    return message


def main(arguments: list[str]) -> int:
    """The child: convert, reporting progress and errors as JSON lines."""
    source, target = (Path(argument) for argument in arguments)

    def say(**message: Any) -> None:
        sys.stdout.write(json.dumps({"headrace": message}) + "\n")
        sys.stdout.flush()  # raises when the parent is gone: nobody would publish the result

    try:
        _convert(source, target, lambda done, total: say(done=done, total=total))
    except ModelError as error:
        say(error=str(error))
        return 1
    return 0


def _convert(source: Path, target: Path, report: Report) -> None:
    steps = 5
    report(0, steps)
    metadata = _read_metadata(source)
    report(1, steps)
    # Imported here: only the child pays for torch.
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = torch.float32 if metadata["parameters"] <= FLOAT32_LIMIT else torch.bfloat16
    try:
        model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=dtype)
        report(2, steps)
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    except (ValueError, KeyError, NotImplementedError, RuntimeError, OSError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{source.name}: Transformers cannot read this GGUF file of architecture "
            f"{metadata['architecture']!r}: {first[0]}"
        ) from error
    report(3, steps)
    _repair_config(model, metadata)
    _repair_tokenizer(tokenizer, metadata, source.name)
    _check_model(model, source.name)
    _check_tokenizer(tokenizer, model.config, source.name)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_torch_state_dict(tensors, str(target), metadata={"format": "pt"})
    report(4, steps)
    model.config.save_pretrained(str(target))
    model.generation_config.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    _tidy_tokenizer_config(target, model.config)
    _check_written(target, model.config)
    report(5, steps)


def _read_metadata(source: Path) -> dict[str, Any]:
    """What the GGUF file says of itself: the keys the repairs need."""
    import gguf

    try:
        reader = gguf.GGUFReader(str(source))
    except (ValueError, OSError, IndexError, OverflowError) as error:
        raise ModelError(f"{source} is not a whole GGUF file: {error}") from error

    def value(key: str, default: Any = None) -> Any:
        entry = reader.get_field(key)
        return default if entry is None else entry.contents()

    architecture = value("general.architecture")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if architecture is None or tokens is None:
        raise ModelError(f"{source.name} holds no language model: it names no architecture or has no vocabulary")
    return {
        "architecture": architecture,
        "parameters": sum(int(tensor.n_elements) for tensor in reader.tensors),
        "tokenizer": value("tokenizer.ggml.model"),
        "pre": value("tokenizer.ggml.pre"),
        "template": value("tokenizer.chat_template"),
        "context": value(f"{architecture}.context_length"),
        # A chat model ends a turn with another token than a text (Llama 3: <|eot_id|>); both end a generation.
        "ends": [
            int(token)
            for key in ("eos", "eot", "eom")
            if (token := value(f"tokenizer.ggml.{key}_token_id")) is not None
        ],
    }


def _repair_config(model: Any, metadata: dict[str, Any]) -> None:
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


def _repair_tokenizer(tokenizer: Any, metadata: dict[str, Any], name: str) -> None:
    """Give a byte-level vocabulary the splitting it was trained with, and the chat template of the file.

    The file names the splitting in `tokenizer.ggml.pre`. Transformers 5.24 knows some names and treats all others as
    GPT-2's, which for instance cuts "  12" of the SmolLM family differently from its training.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = metadata["pre"]
    if metadata["tokenizer"] == "gpt2":
        if pre in _INDIVIDUAL_DIGITS:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        elif pre not in _GPT2_SPLIT and pre not in GGUF_PRE_TOKENIZER_SPLITS:
            raise ModelError(
                f"{name}: the tokenizer's way of splitting text ({pre!r}) is not known, so its tokens would be wrong; "
                "use the safetensors folder of this model"
            )
    if not tokenizer.chat_template and metadata["template"]:
        tokenizer.chat_template = metadata["template"]
    if metadata["context"]:
        tokenizer.model_max_length = int(metadata["context"])
    tokenizer.clean_up_tokenization_spaces = False


def _check_model(model: Any, name: str) -> None:
    import torch

    for key, tensor in model.state_dict().items():
        if tensor.is_meta or not torch.isfinite(tensor).all():
            raise ModelError(f"{name}: tensor {key} is missing or not finite; the file is damaged, fetch it again")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if bool(model.config.tie_word_embeddings) != tied:
        raise ModelError(f"{name}: config and weights disagree on tied embeddings; Transformers misread the file")


def _check_tokenizer(tokenizer: Any, config: Any, name: str) -> None:
    if len(tokenizer) > config.vocab_size:
        raise ModelError(f"{name}: {len(tokenizer)} tokens but only {config.vocab_size} rows of embeddings")
    for text in _ROUND_TRIPS:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            raise ModelError(f"{name}: the converted tokenizer turns {text!r} into {back!r}")
    ends = [config.eos_token_id] if isinstance(config.eos_token_id, int) else list(config.eos_token_id or [])
    if not ends or not all(0 <= token < config.vocab_size for token in ends):
        raise ModelError(f"{name}: no valid end-of-sequence token (got {config.eos_token_id!r})")


def _tidy_tokenizer_config(target: Path, config: Any) -> None:
    """Name a class every Transformers version has, and drop what describes this one conversion."""
    path = target / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for key in ("is_local", "local_files_only", "backend", "gguf_file", "name_or_path"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["clean_up_tokenization_spaces"] = False
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _check_written(target: Path, config: Any) -> None:
    """Read back what was written: every file parses and the weights are all there."""
    from safetensors import safe_open

    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        json.loads((target / name).read_text())
    count = 0
    for path in target.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes 0600, which hides a shared cache from other users
        with safe_open(str(path), framework="pt") as tensors:
            count += len(tensors.keys())
    if count == 0 or "quantization_config" in json.loads((target / "config.json").read_text()):
        raise ModelError(f"the conversion wrote {count} tensors or a config that still claims to be quantised")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
