"""Which constraint on the text a request asks for: `response_format`, vLLM's `guided_*` and `structured_outputs`."""

from typing import Any

import msgspec

from headrace.api.schema import GenerationFields, ResponseFormat, StructuredOutputs, check_depth
from headrace.core.errors import InvalidRequest
from headrace.core.sampling import GrammarSpec

MAX_CHOICES = 1024


def requested_grammar(request: GenerationFields) -> GrammarSpec | None:
    """The one constraint of a request, or None.

    Raises:
        InvalidRequest: more than one is given, or one is of a kind that is not supported.
    """
    found: list[tuple[str, GrammarSpec]] = []
    if request.response_format is not None:
        spec = _response_format(request.response_format)
        if spec is not None:
            found.append(("response_format", spec))
    guided = StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    found += _structured(guided, "guided_")
    if request.structured_outputs is not None:
        here = _structured(request.structured_outputs, "structured_outputs.")
        if not here:
            kinds = "json, json_object, regex, choice or grammar"
            raise InvalidRequest(f"structured_outputs needs one of {kinds}", "structured_outputs")
        found += here
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise InvalidRequest(f"give only one constraint on the text, not {names}", found[1][0])
    return found[0][1] if found else None


def _response_format(given: ResponseFormat) -> GrammarSpec | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return GrammarSpec("json_object")
    if given.type == "json_schema":
        if given.json_schema is None:
            raise InvalidRequest(
                "response_format of type json_schema needs the field `json_schema`", "response_format.json_schema"
            )
        if given.json_schema.schema is None:
            return GrammarSpec("json_object")
        return _schema(given.json_schema.schema, "response_format.json_schema.schema")
    raise InvalidRequest(
        f"response_format.type must be text, json_object or json_schema, got {given.type[:100]!r}",
        "response_format.type",
    )


def _structured(given: StructuredOutputs, prefix: str) -> list[tuple[str, GrammarSpec]]:
    found: list[tuple[str, GrammarSpec]] = []
    compact = bool(given.disable_any_whitespace)
    if given.json is not None:
        found.append((f"{prefix}json", _schema(given.json, f"{prefix}json", compact)))
    if given.json_object:
        name = f"{prefix}json_object"
        found.append((name, _schema({"type": "object"}, name, compact) if compact else GrammarSpec("json_object")))
    if given.regex is not None:
        found.append((f"{prefix}regex", GrammarSpec("regex", given.regex)))
    if given.choice is not None:
        if not 0 < len(given.choice) <= MAX_CHOICES or not all(given.choice):
            raise InvalidRequest(
                f"`{prefix}choice` needs 1 to {MAX_CHOICES} strings, none of them empty", f"{prefix}choice"
            )
        found.append((f"{prefix}choice", GrammarSpec("choice", msgspec.json.encode(given.choice).decode())))
    if given.grammar is not None:
        found.append((f"{prefix}grammar", GrammarSpec("lark", given.grammar)))
    if given.structural_tag is not None:
        raise InvalidRequest("structural tags are not supported; use a Lark grammar", f"{prefix}structural_tag")
    return found


def _schema(schema: str | dict[str, Any], param: str, compact: bool = False) -> GrammarSpec:
    """The grammar of a schema; `compact`: without white space between the parts of the text."""
    if isinstance(schema, str):
        try:
            parsed = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"`{param}` is not valid JSON: {error}", param) from None
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"`{param}` must be a JSON schema in an object", param)
        schema = parsed
    check_depth(schema, param)
    if compact:  # llguidance reads its options from this key
        schema = {**schema, "x-guidance": {"whitespace_pattern": ""}}
    return GrammarSpec("json_schema", msgspec.json.encode(schema).decode())
