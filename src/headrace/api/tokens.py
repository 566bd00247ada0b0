"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.chunks import encode
from headrace.api.prompts import chat_text, check_tokens
from headrace.api.prompts import encode as encode_prompt
from headrace.api.schema import decode
from headrace.api.schema_chat import ChatRequest
from headrace.api.schema_completion import DETOKENIZE_DECODER, TOKENIZE_DECODER
from headrace.api.state import ServerState
from headrace.api.submit import read_body
from headrace.api.tool_choice import tool_use
from headrace.core.errors import InvalidRequest


async def tokenize(state: ServerState, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    body = decode(TOKENIZE_DECODER, await read_body(request))
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either `prompt` or `messages`", "prompt")
    if body.messages is not None:
        going_on = bool(body.continue_final_message)
        tools = tool_use(ChatRequest(messages=body.messages, tools=body.tools), available=True)
        text = await chat_text(
            state,
            body.messages,
            tools.functions,
            add_generation_prompt=not going_on if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=going_on,
            variables=body.chat_template_kwargs,
        )
        tokens = await encode_prompt(state, text, "messages", bool(body.add_special_tokens))
    else:
        text = body.prompt or ""
        special = body.add_special_tokens is not False
        tokens = await encode_prompt(state, text, "prompt", special) if text else state.tokenizer.encode("")
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": state.info.max_model_len, "tokens": tokens}
    answer["token_strs"] = [state.texts.text(token) for token in tokens] if body.return_token_strs else None
    return Response(encode(answer), media_type="application/json")


async def detokenize(state: ServerState, request: Request) -> Response:
    """The text of token ids."""
    body = decode(DETOKENIZE_DECODER, await read_body(request))
    state.check_model(body.model)
    check_tokens(body.tokens, state.info.vocab_size, "tokens")
    text = await asyncio.to_thread(state.tokenizer.decode, body.tokens)
    return Response(encode({"prompt": text}), media_type="application/json")
