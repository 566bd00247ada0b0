"""From a request's messages to the plain dicts that chat templates render."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.api.schema import check_depth
from headrace.api.schema_chat import ContentPart, FunctionSpec, Message, ToolCall
from headrace.core.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text content, `developer` as `system`, arguments as objects.

    Raises:
        InvalidRequest: unknown role, content that is not text, or a message with nothing in it.
    """
    if not messages:
        raise InvalidRequest("`messages` must not be empty", "messages")
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequest(f"`{where}.role` must be one of {', '.join(ROLES)}", f"{where}.role")
    if message.audio is not None:
        raise InvalidRequest("audio is not supported; send text", f"{where}.audio")
    if message.function_call is not None:
        raise InvalidRequest("`function_call` is OpenAI's old form; use `tool_calls`", f"{where}.function_call")
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    content = message.content if message.content is not None else message.refusal
    if content is None and not (role == "assistant" and message.tool_calls):
        raise InvalidRequest(f"`{where}.content` is missing", f"{where}.content")
    plain: dict[str, Any] = {"role": role, "content": _text(content or "", where)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(message.tool_calls)]
    return plain


def _text(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content):
        param = f"{where}.content[{i}]"
        if part.type in ("text", "input_text", "output_text") and part.text is not None:
            texts.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type in ("text", "input_text", "output_text", "refusal"):
            raise InvalidRequest(f"`{param}` of type {part.type} has no text", param)
        else:
            raise InvalidRequest(
                f"`{param}` has type {part.type[:100]!r}; this model takes only parts of type text", f"{param}.type"
            )
    return "\n".join(texts)


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        # Templates write arguments with `tojson`: give them the object, as it stood in the model's own output.
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            param = f"{where}.function.arguments"
            raise InvalidRequest(f"`{param}` is not valid JSON", param) from None
    check_depth(arguments, f"{where}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"id": call.id, "type": "function", "function": function}


def function_dict(function: FunctionSpec) -> dict[str, Any]:
    """A tool as templates print it."""
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": described}


def write_tools_into_text(messages: list[dict[str, Any]], functions: Sequence[FunctionSpec]) -> list[dict[str, Any]]:
    """For templates that know no tools: the Hermes form in plain messages.

    The tools become part of the system message, calls become text of the assistant, results become user messages.
    """
    told: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if told and told[-1].get("results"):
                told[-1]["content"] += f"\n{text}"
            else:
                told.append({"role": "user", "content": text, "results": True})
            continue
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        plain["content"] = "\n".join(filter(None, [message["content"], *calls]))
        told.append(plain)
    for message in told:
        message.pop("results", None)
    if functions:
        system = _system_text(functions)
        if told[0]["role"] == "system":
            told[0]["content"] = f"{told[0]['content']}\n\n{system}"
        else:
            told.insert(0, {"role": "system", "content": system})
    return told


def _system_text(functions: Sequence[FunctionSpec]) -> str:
    listed = "\n".join(json.dumps(function_dict(f), ensure_ascii=False) for f in functions)
    return (
        "You can call functions. Their signatures, as JSON, are:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with its name and its arguments as a JSON object, like this:\n"
        '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n</tool_call>\n'
        "Use one such block per call. Call a function only if it helps with the user's question."
    )
