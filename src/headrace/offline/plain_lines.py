"""Lines whose prompt is token ids beside a few plain fields, understood fast: what the largest files consist of.

Sound, not complete: a line that is taken here means the same to `batch run`; all others, wrong ones too, are left to
`offline.jobs.lines` and to whoever knows what bodies mean (`plan_input.Bodies`).
"""

from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.core.sampling import MAX_N
from headrace.front.options import DEFAULT_TOKENS
from headrace.offline.jobs.lines import COMPLETIONS, MAX_CUSTOM_ID
from headrace.offline.model_limits import ModelLimits

Tokens = NDArray[np.int32]
_HALF = 1 << 63


class PlainLine(NamedTuple):
    """A completion of token ids.

    Attributes:
        custom_id: of the line.
        tokens: its prompt.
        most: tokens that all its sequences may generate.
    """

    custom_id: str
    tokens: Tokens
    most: int


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """The bounds are those of `core.sampling.SamplingParams`."""

    prompt: msgspec.Raw
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = DEFAULT_TOKENS
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-_HALF, le=_HALF - 1)] | None = None
    ignore_eos: bool | None = None


class _Line(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: Literal["POST"]
    url: str
    body: _Body


_DECODER = msgspec.json.Decoder(_Line)


def plain_line(data: bytes, limits: ModelLimits) -> PlainLine | None:
    """What a line asks for; None: it is not of this simple kind."""
    try:
        data.decode()  # also what the decoder skips
        line = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    body, names = line.body, limits.names
    if line.url != COMPLETIONS:
        return None
    if names is not None and body.model not in (None, "default") and body.model not in names:
        return None
    tokens = _token_ids(bytes(body.prompt), limits.vocabulary)
    if tokens is None or len(tokens) + body.max_tokens > limits.context:
        return None
    return PlainLine(line.custom_id, tokens, body.max_tokens * (body.n or 1))


def _token_ids(text: bytes, vocabulary: int) -> Tokens | None:
    """The ids of a JSON value; None where it is anything but a list of some numbers below the vocabulary."""
    if not text.startswith(b"["):
        return None
    digits = text[1:-1]
    if digits.translate(None, b"0123456789, \t\r\n") or not digits.strip():
        return None
    # Numbers alone are left: NumPy reads them three times as fast as a JSON decoder makes a list.
    ids = np.fromstring(digits.decode(), np.int64, sep=",")
    return ids.astype(np.int32) if int(ids.max()) < vocabulary else None
