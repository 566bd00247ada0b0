"""From a request to prompt token ids, off the event loop where it takes long."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.api.messages import function_dict, template_messages, write_tools_into_text
from headrace.api.schema import check_depth
from headrace.api.schema_chat import FunctionSpec, Message
from headrace.api.state import ServerState
from headrace.core.errors import InvalidRequest

MAX_SEQUENCES = 1024  # prompts x n of one request
INLINE_CHARACTERS = 2000
BYTES_PER_TOKEN = 512  # no tokenizer's text needs more per token, not even long runs of one character

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


async def chat_text(
    state: ServerState,
    messages: Sequence[Message],
    functions: Sequence[FunctionSpec],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any] | None,
) -> str:
    """The text of a conversation by the model's chat template; templates that know no tools get them as text.

    Raises:
        InvalidRequest: messages or variables that cannot be rendered.
    """
    check_length(len(messages), "messages", state.info.max_model_len, "messages")
    variables = variables or {}
    for name in _RESERVED:
        if name in variables:
            raise InvalidRequest(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")
    check_depth(variables, "chat_template_kwargs")

    def render() -> str:
        plain = template_messages(messages)
        tools: list[dict[str, Any]] | None = [function_dict(f) for f in functions] or None
        if not knows_tools(state) and (tools or any(m["role"] == "tool" or "tool_calls" in m for m in plain)):
            plain = write_tools_into_text(plain, functions)
            tools = None
        return state.tokenizer.render_chat(
            plain,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    size = sum(len(m.content) if isinstance(m.content, str) else INLINE_CHARACTERS for m in messages)
    if functions or len(messages) > 20 or size > INLINE_CHARACTERS:
        return await asyncio.to_thread(render)
    return render()


def knows_tools(state: ServerState) -> bool:
    """Whether the chat template prints tools and calls by itself."""
    return "tool" in (state.tokenizer.chat_template or "")


async def encode(state: ServerState, text: str, param: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text.

    Raises:
        InvalidRequest: the text cannot fit the context, or is empty.
    """
    limit = state.info.max_model_len
    if len(text) > limit * BYTES_PER_TOKEN:
        check_length(len(text), "characters", limit, param)
    tokens = await state.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
    if not tokens:
        raise InvalidRequest("the prompt is empty: it has no token", param)
    return tokens


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids that the model does not have."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InvalidRequest(f"`{param}` holds token {wrong}, not in the vocabulary of {vocab_size}", param)


def check_length(count: int, what: str, limit: int, param: str) -> None:
    """Refuse early what cannot fit the context by far, so that no time is spent on it."""
    if count > limit:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. However, the prompt has {count} {what}. "
            "Please shorten it.",
            param,
            "context_length_exceeded",
        )


def check_sequences(count: int) -> None:
    """Refuse requests that would flood the queue by themselves."""
    if count > MAX_SEQUENCES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_SEQUENCES}, got {count}", "prompt")
