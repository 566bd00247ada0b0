"""Reading request bodies: JSON straight into typed structs, and what chat and completions have in common.

Unknown fields are ignored, as OpenAI-compatible servers do, and said in the log once each; wrong types are refused
with the field's name.
"""

import logging
import re
from typing import Any, TypeVar

import msgspec

from headrace.api.errors import ApiError
from headrace.core.errors import InvalidRequest
from headrace.core.settings import nearest

MAX_JSON_DEPTH = 64  # of free-form values; templates and grammar compilers recurse over them

MAX_WARNED = 100  # names; clients choose them, and neither memory nor log may grow without end

log = logging.getLogger("headrace.api")

T = TypeVar("T")

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_warned: set[str] = set()


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`; `schema` may be left out."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format`: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of these; a misspelled one must not go unnoticed."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields that chat and text completions share; None means: not given."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    thinking_token_budget: Any = None
    service_tier: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Parse a request body.

    Raises:
        InvalidRequest: not JSON (also: not UTF-8, NaN, too deep), or a field of the wrong type, named in `param`.
    """
    if not body:
        raise InvalidRequest("the request has no body; send a JSON object", code="invalid_json")
    try:
        decoded = decoder.decode(body)
        _warn_of_unknown(type(decoded), body)  # may find that what was skipped is no JSON
    except msgspec.ValidationError as error:
        raise wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request's body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the request's JSON is nested too deeply", code="invalid_json") from None
    return decoded


def _warn_of_unknown(kind: type, body: bytes) -> None:
    """Log the fields of a body that mean nothing to us, each once in this process."""
    for name in _FIELDS.decode(body).keys() - set(kind.__struct_fields__) - _warned:  # type: ignore[attr-defined]
        if len(_warned) >= MAX_WARNED or len(name) > 100:
            return
        _warned.add(name)
        log.warning("the field %r of a request is not known here; it is ignored", name, extra={"field": name})


def wrong_type(message: str) -> InvalidRequest:
    """The 400 of what msgspec says of a field."""
    path = _PATH.search(message)
    param = path.group(1) if path else ""
    said = message[: path.start()] if path else message
    missing = _MISSING.search(said)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InvalidRequest(f"the field `{param}` is missing", param, "missing_required_parameter")
    unknown = _UNKNOWN.search(said)
    if unknown:
        name, known = unknown.group(1)[:100], StructuredOutputs.__struct_fields__  # the only struct that forbids any
        return InvalidRequest(f"`{param}` has no field `{name}`{nearest(name, known)}", f"{param}.{name}")
    where = f"`{param}`: " if param else "the request's body: "
    return InvalidRequest(f"{where}{said[0].lower()}{said[1:]}", param or None, "invalid_type")


def check_depth(value: Any, param: str) -> None:
    """Refuse free-form JSON nested deeper than `MAX_JSON_DEPTH`."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return
        level = below
    raise InvalidRequest(f"`{param}` is nested deeper than {MAX_JSON_DEPTH} levels", param)


def check_content_type(value: str | None) -> None:
    """Bodies must be JSON; a client that names no type is believed."""
    if value is None:
        return
    kind = value.split(";", 1)[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"send the body as Content-Type: application/json, not {kind[:100]!r}")
