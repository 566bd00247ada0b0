"""What a model will need, read from the headers of its files."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from headrace.core.errors import ModelError
from headrace.model.shape import ModelShape

#: Interpreter, torch and Transformers with their code, before any weight.
RUNTIME_BYTES = 700 << 20

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a loaded model takes.

    Attributes:
        params: weights in the files.
        file_bytes: size of the tensors in the files.
        weight_bytes: the weights in the type of the computation, the packed copy of a tied head counted.
        peak_bytes: resident memory while loading, interpreter and libraries counted; KV comes on top.
    """

    params: int
    file_bytes: int
    weight_bytes: int
    peak_bytes: int


def step_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of the activations of a step of so many tokens at their peak, in one layer: the residual stream twice, the
    norm's output, q, k, v and the attention's output, and the MLP's inner rows with gate and up beside them."""
    width = 3 * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.intermediate
    return tokens * width * shape.itemsize


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder, those of its index where it has one.

    Raises: ModelError if the folder has none, or one of the index is missing.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is not a valid weight index: {error}") from error
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ModelError(f"{path} lacks {missing[0]}, which its weight index names; fetch the model again")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} holds no .safetensors file; convert the model with `headrace models pull`")
    single = path / "model.safetensors"
    return [single] if single in files else files


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets} of a safetensors file. Raises ModelError if it is not one."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("the header is longer than the file")
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if 8 + length + end != file.stat().st_size:
            raise ValueError(f"{file.stat().st_size} bytes where the header announces {8 + length + end}")
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not a whole safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header


def estimate(path: Path, dtype: str = "auto") -> MemoryEstimate:
    """What loading the model folder `path` in `dtype` will need, before loading it.

    Raises: ModelError for a folder without configuration or whole weight files.
    """
    config = read_config(path)
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    itemsize = _ITEMSIZE.get(dtype, 4)
    shapes: dict[str, list[int]] = {}
    file_bytes = largest = 0
    for file in weight_files(path):
        for name, entry in read_header(file).items():
            shapes[name] = entry["shape"]
            file_bytes += entry["data_offsets"][1] - entry["data_offsets"][0]
            largest = max(largest, prod(entry["shape"]) * itemsize)
    params = sum(prod(shape) for shape in shapes.values())
    head = 0
    if not any(name.endswith("lm_head.weight") for name in shapes):
        vocabulary = int(config.get("vocab_size", 0))
        head = max((prod(s) for s in shapes.values() if len(s) == 2 and s[0] == vocabulary), default=0)
    weights = (params + head) * itemsize
    return MemoryEstimate(params, file_bytes, weights, weights + 2 * largest + RUNTIME_BYTES)


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises ModelError if it is missing or not an object."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path} holds no config.json; is it a model folder?") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return config
