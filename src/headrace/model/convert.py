"""From a GGUF file to a folder that Transformers, and anything else, can load.

The work is done by a child process (`python -m headrace.model.convert SOURCE TARGET`): it needs torch and the model's
memory, which the caller, often a front process that must stay light, does not keep.

Transformers 5.24 reads weights and shapes from a GGUF file, but some of what it writes back is not what the model was
trained with; `gguf_repair` puts that right and refuses a result that is not sound.
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
from headrace.model.gguf_repair import (
    check_model,
    check_splitting,
    check_tokenizer,
    read_metadata,
    repair_config,
    repair_tokenizer,
)
from headrace.model.progress import Progress, ProgressCallback

CONVERTER = 2
"""Version of this converter: folders made by another one are converted again."""

FLOAT32_LIMIT = 1_500_000_000
"""Models with more parameters than this are written as bfloat16: 32 bits would be six times the GGUF file's size."""


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
    metadata = read_metadata(source)
    check_splitting(metadata, source.name)
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
    repair_config(model, metadata)
    repair_tokenizer(tokenizer, metadata)
    check_model(model, source.name)
    check_tokenizer(tokenizer, model.config, source.name)
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
