"""From a model folder to a decoder that runs."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import ConfigError, ModelError
from headrace.model import rope
from headrace.model.attention import AttentionCall
from headrace.model.decoder import Decoder, find_layers
from headrace.model.fingerprint import fingerprint, weights_digest
from headrace.model.fuse import fuse_layer, fuse_norm
from headrace.model.linears import pack_linears
from headrace.model.memory import MemoryEstimate, estimate, weight_files
from headrace.model.probe import probe, trial_rows
from headrace.model.reading import read_model
from headrace.model.release import Weights
from headrace.model.shape import count_shape
from headrace.model.support import check_config
from headrace.perf.model_config import longest_context

__all__ = ["MemoryEstimate", "estimate", "load"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: Called with a phase (`read`, `check`, `pack`) and how much of it is done, 0..1.
Progress = Callable[[str, float], None]


def load(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int = 0,
    max_model_len: int = 0,
    progress: Progress | None = None,
) -> Decoder:
    """Load a model folder (config.json and safetensors).

    Args:
        path: the folder.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: the checkpoint's.
        device: `cpu` or `cuda`; `auto`: cuda where there is one.
        threads: torch threads of this process; 0: all cores it may use.
        max_model_len: longest sequence in tokens; 0: what the model supports. Fixes length-dependent RoPE.
        progress: told how far loading is.

    Raises:
        ModelError: the model is not supported (the message names the part), or its files are not whole.
        ConfigError: a wrong argument.
    """
    tell = progress or (lambda phase, done: None)
    target = _device(device)
    if target.type == "cpu":
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    estimate(path, dtype)  # refuses incomplete files before anything is read
    config = _config(path)
    check_config(config)
    kind = _dtype(config, dtype)
    longest = _max_position(config, max_model_len)
    with ThreadPoolExecutor(1, "digest") as pool:
        digest = pool.submit(weights_digest, weight_files(path))
        tell("read", 0.0)
        model = read_model(path, config, kind, target)
        tell("read", 1.0)
        frozen = rope.freeze(model, config, longest)
        owner, _ = find_layers(model)
        decoder = Decoder(model, owner)
        tell("check", 0.0)
        calls = probe(decoder)
        print_ = fingerprint(digest.result(), config.to_dict(), str(kind).removeprefix("torch."), frozen)
    decoder.shape = count_shape(
        model, decoder.layers, config, calls, longest, _eos(path, config), print_, target.type == "cpu"
    )
    if target.type == "cpu":
        _prepare(decoder, calls, tell)
    decoder.shorten()
    return decoder


@torch.inference_mode()
def _prepare(decoder: Decoder, calls: list[AttentionCall], tell: Progress) -> None:
    """Fuse and pack layer by layer, so that each layer's weights are freed before the next is packed."""
    weights = Weights(decoder.model)
    for layer in decoder.layers:
        weights.add(layer)
    fwd = trial_rows(decoder)
    hidden = fwd.hidden[None]
    for index, layer in enumerate(list(decoder.layers)):
        tell("pack", index / (len(decoder.layers) + 1))
        decoder.layers[index], hidden = fuse_layer(layer, hidden, fwd.calls[index], calls[index], index, weights)
    fuse_norm(decoder.owner, hidden)
    pack_linears(decoder.model, weights)
    tell("pack", 1.0)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or auto, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    return torch.device(name)


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{path}: Transformers cannot read config.json: {str(error).splitlines()[0]}") from error


def _dtype(config: Any, name: str) -> torch.dtype:
    if name == "auto":
        stored = getattr(config, "dtype", None)
        return stored if isinstance(stored, torch.dtype) and stored in _DTYPES.values() else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be auto, float32, bfloat16 or float16, not {name!r}")
    return _DTYPES[name]


def _max_position(config: Any, asked: int) -> int:
    supported = longest_context(
        getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None)
    )
    if asked < 0:
        raise ConfigError(f"max_model_len must not be negative, got {asked}")
    if asked and supported and asked > supported:
        raise ConfigError(f"max_model_len {asked} is longer than the {supported} positions the model supports")
    if not (asked or supported):
        raise ConfigError("the model's configuration does not say how long a sequence may be; set --max-model-len")
    return asked or supported


def _eos(path: Path, config: Any) -> tuple[int, ...]:
    """From generation_config.json where it has them (chat models end turns with more than one), else config.json."""
    from transformers import GenerationConfig

    ids = None
    if (path / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
