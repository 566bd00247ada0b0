"""Default sampling parameters from a model's `generation_config.json`."""

import json
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidRequest, ModelError
from headrace.core.sampling import SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling(folder: Path) -> SamplingParams:
    """What the model's makers recommend; Headrace's (OpenAI's) defaults for what the file does not say.

    Reads the keys that vLLM reads: temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens.

    Raises:
        ModelError: the file cannot be read, or holds a value out of range.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        given = {ours: settings[theirs] for theirs, ours in _NAMES.items() if settings.get(theirs) is not None}
        params = SamplingParams(**given)
        params.check()
    except (OSError, ValueError, TypeError, AttributeError, InvalidRequest) as error:
        raise ModelError(f"{path}: {error}; correct it or pass --no-generation-config") from error
    return params
