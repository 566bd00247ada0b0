"""How much each request of a batch file is expected to produce."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import ConfigError
from headrace.offline.plan_input import PlanInput


def expected_lengths(given: PlanInput, results: Path | None, share: float, room: int = 1 << 31) -> NDArray[np.int64]:
    """Output tokens of each request.

    Args:
        given: the batch.
        results: an output file of an earlier run of the same requests, in OpenAI's format (`usage.completion_tokens`
            of each line's response), or lines `{"custom_id": ..., "output_tokens": n}`; None: there is none.
        share: of `max_tokens`, for requests that the results do not name.
        room: tokens of KV that one line may have. The sequences of a line with several prompts, or with `n`, are one
            request here; what of their output does not fit beside each other is not counted.

    Raises:
        ConfigError: the results cannot be read, or hold nothing of this batch.
    """
    limits = np.minimum(given.requests.max_tokens, room - given.requests.prompt_lengths)
    expected = np.maximum(1, np.round(limits * share)).astype(np.int64)
    if results is None:
        return expected
    seen = _results(results)
    places = [(place, seen[name]) for place, name in enumerate(given.ids) if name in seen]
    if not places:
        raise ConfigError(f"{results} holds no result of these requests (by custom_id)")
    at, counts = np.array(places, np.int64).T
    expected[at] = np.clip(counts, 1, limits[at])
    return expected


def _results(path: Path) -> dict[str, int]:
    seen: dict[str, int] = {}
    number = 0
    try:
        with path.open("rb") as file:
            for line in file:
                number += 1
                if line.strip():
                    document = msgspec.json.decode(line)
                    tokens = _tokens(document)
                    if tokens is not None:
                        seen[str(document["custom_id"])] = tokens
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, KeyError) as error:
        raise ConfigError(f"{path}, line {number}: not a result line ({error})") from error
    return seen


def _tokens(document: Any) -> int | None:
    """Output tokens of a result line; None where it holds none (a failed request)."""
    if not isinstance(document, dict):
        return None
    direct = document.get("output_tokens")
    if isinstance(direct, int):
        return direct
    usage: Any = document
    for name in ("response", "body", "usage"):
        usage = usage.get(name) if isinstance(usage, dict) else None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else None
