"""The body of POST /v1/chat/completions."""

from typing import Any

import msgspec

from headrace.api.schema import GenerationFields


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message; only text (and a refusal, which is text) is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """A call the assistant made in an earlier turn; `arguments` is JSON in a string."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier assistant message."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Any = None
    function_call: Any = None


class FunctionSpec(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """An entry of `tools`."""

    type: str = "function"
    function: FunctionSpec | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    """Names a function."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """`tool_choice` that forces one function."""

    type: str = "function"
    function: FunctionName | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """The body of a chat completion request."""

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None


CHAT_DECODER = msgspec.json.Decoder(ChatRequest)
