"""Lark grammars (as llguidance reads them) that force or allow tool calls in the Hermes dialect."""

import json
from collections.abc import Sequence
from typing import Any

from headrace.api.schema_chat import FunctionSpec

# The separators models see in their templates; leaving white space free lets small models write nothing else.
_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_calls(functions: Sequence[FunctionSpec], parallel: bool) -> str:
    """A grammar of one call of one of `functions`, or of one and more."""
    more = ' ("\\n" call)*' if parallel else ""
    return "\n".join([f"start: call{more}", *_call_rules(functions)])


def calls_or_json(functions: Sequence[FunctionSpec], parallel: bool, schema: dict[str, Any]) -> str:
    """A grammar of either calls or an answer that follows a JSON schema."""
    more = ' ("\\n" call)*' if parallel else ""
    rules = [f"start: calls | answer\ncalls: call{more}", f"answer: %json {json.dumps(schema)}"]
    return "\n".join([*rules, *_call_rules(functions)])


def _call_rules(functions: Sequence[FunctionSpec]) -> list[str]:
    choices = " | ".join(f"function{i}" for i in range(len(functions)))
    rules = [f'call: "<tool_call>\\n" ({choices}) "\\n</tool_call>"']
    for i, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        schema = {**(function.parameters or _NO_PARAMETERS), "x-guidance": _GUIDANCE}
        rules.append(f'function{i}: {head} arguments{i} "}}"\narguments{i}: %json {json.dumps(schema)}')
    return rules
