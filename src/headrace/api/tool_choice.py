"""What a request's `tools` and `tool_choice` mean."""

import re
from dataclasses import dataclass

import msgspec

from headrace.api.schema import check_depth
from headrace.api.schema_chat import ChatRequest, FunctionSpec, NamedToolChoice
from headrace.api.tool_grammar import calls_or_json, forced_calls
from headrace.core.errors import InvalidRequest
from headrace.core.sampling import GrammarSpec

MAX_TOOLS = 256

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class ToolUse:
    """Tools of one request.

    Attributes:
        functions: what the prompt lists; empty with `tool_choice: none`.
        parse: calls in the answer are taken out of its text.
        parallel: more than one call is allowed.
        forced: functions one of which must be called; empty: the model chooses.
    """

    functions: tuple[FunctionSpec, ...] = ()
    parse: bool = False
    parallel: bool = True
    forced: tuple[FunctionSpec, ...] = ()

    def grammar(self, other: GrammarSpec | None) -> GrammarSpec | None:
        """The constraint on the text, together with the one the request asks for by itself."""
        if self.forced:
            if other is not None:
                raise InvalidRequest("tool_choice forces a call, so the text takes no other constraint", "tool_choice")
            return GrammarSpec("lark", forced_calls(self.forced, self.parallel))
        if other is None or not self.parse:
            return other
        if other.kind not in ("json_schema", "json_object"):
            raise InvalidRequest(f"tools cannot be combined with a {other.kind} constraint", "tools")
        schema = msgspec.json.decode(other.text) if other.text else {"type": "object"}
        return GrammarSpec("lark", calls_or_json(self.functions, self.parallel, schema))


def tool_use(request: ChatRequest, available: bool) -> ToolUse:
    """Read and check the tool fields.

    Args:
        request: the request.
        available: whether this server parses tool calls.

    Raises:
        InvalidRequest: a tool or the choice is malformed, or the server was started without tool calls.
    """
    if request.functions is not None or request.function_call is not None:
        raise InvalidRequest("`functions` and `function_call` are OpenAI's old form; use `tools`", "functions")
    choice = request.tool_choice
    functions = _functions(request)
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs `tools`", "tool_choice")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    if not available:
        raise InvalidRequest("this server was started with --tool-parser none", "tools")
    parallel = request.parallel_tool_calls is not False
    if choice in (None, "auto"):
        return ToolUse(functions, True, parallel)
    if choice == "required":
        return ToolUse(functions, True, parallel, functions)
    if isinstance(choice, NamedToolChoice):
        if choice.type != "function" or choice.function is None:
            raise InvalidRequest("tool_choice must be of type function and name one", "tool_choice")
        named = tuple(f for f in functions if f.name == choice.function.name)
        if not named:
            raise InvalidRequest(f"tool_choice names {choice.function.name[:100]!r}, not among `tools`", "tool_choice")
        return ToolUse(functions, True, False, named)
    raise InvalidRequest("tool_choice must be none, auto, required or name a function", "tool_choice")


def _functions(request: ChatRequest) -> tuple[FunctionSpec, ...]:
    tools = request.tools or []
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools, got {len(tools)}", "tools")
    functions: list[FunctionSpec] = []
    for i, tool in enumerate(tools):
        param = f"tools[{i}]"
        if tool.type != "function" or tool.function is None:
            raise InvalidRequest(f"`{param}` must be of type function and hold one", param)
        if not _NAME.fullmatch(tool.function.name):
            raise InvalidRequest(
                f"`{param}.function.name` must be 1 to 128 letters, digits, dots, _ or -", f"{param}.function.name"
            )
        check_depth(tool.function.parameters, f"{param}.function.parameters")
        functions.append(tool.function)
    if len({f.name for f in functions}) < len(functions):
        raise InvalidRequest("two of the tools have the same name", "tools")
    return tuple(functions)
