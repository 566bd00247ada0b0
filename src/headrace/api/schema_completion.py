"""The bodies of POST /v1/completions, /tokenize and /detokenize."""

from typing import Any

import msgspec

from headrace.api.schema import GenerationFields
from headrace.api.schema_chat import Message, Tool


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of a text completion request.

    `prompt` is a string, a list of strings, a list of token ids, or a list of such lists.
    """

    prompt: str | list[int | str | list[int]]
    max_tokens: int | None = 16
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /tokenize as vLLM has it: a `prompt`, or `messages` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


COMPLETION_DECODER = msgspec.json.Decoder(CompletionRequest)
TOKENIZE_DECODER = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE_DECODER = msgspec.json.Decoder(DetokenizeRequest)
