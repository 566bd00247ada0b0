"""Writing SSE events cheaply: what is the same in every chunk of a stream is encoded once."""

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

encode = msgspec.json.Encoder().encode


def usage_dict(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class ChunkWriter:
    """Frames `choices` entries as chunks of one stream.

    Args:
        common: the chunk's fields besides `choices` and `usage`.
        include_usage: every chunk carries `usage`, null but in the last (or always set, if a caller passes it).
    """

    def __init__(self, common: dict[str, Any], include_usage: bool) -> None:
        self._head = b"data: " + encode(common)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: bytes, usage: dict[str, Any] | None = None) -> bytes:
        """An event with one choice, given as JSON."""
        if usage is None:
            return self._head + choice + self._tail
        return self._head + choice + b'],"usage":' + encode(usage) + b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event without choices that ends a stream with `include_usage`."""
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """An error inside a stream whose status line is already sent."""
    return b"data: " + encode(body) + b"\n\n"
