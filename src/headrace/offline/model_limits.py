"""What a model that is planned for takes, from its configuration alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.perf.model_config import longest_context


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What is planned for takes.

    Attributes:
        context: tokens that a sequence may have, prompt and output.
        vocabulary: token ids are below this.
        names: of the model, beside `default`; None: any name is taken.
        room: tokens of the KV pool that the prompts and outputs of one line may have together.
    """

    context: int = (1 << 31) - 1
    vocabulary: int = 1 << 31
    names: frozenset[str] | None = None
    room: int = (1 << 31) - 1


def model_limits(folder: Path | None, name: str, kv_tokens: int, room: int) -> ModelLimits:
    """What an engine takes that has this model and a KV pool of so many tokens.

    Args:
        folder: of the model; None: a model without files, of which neither context, vocabulary nor name is known.
        name: of the model in the API.
        kv_tokens: tokens of the pool.
        room: see `ModelLimits`.
    """
    if folder is None:
        return ModelLimits(kv_tokens, room=room)
    config: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    context = longest_context(config.get("max_position_embeddings"), rope) or kv_tokens
    return ModelLimits(min(context, kv_tokens), config["vocab_size"], frozenset((name,)), room)
