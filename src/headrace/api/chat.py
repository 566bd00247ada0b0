"""POST /v1/chat/completions, and lines of a batch for that route."""

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.chat_answer import ChatSpec, ChatStream, ChatWhole
from headrace.api.meter import Meter
from headrace.api.prepared import Prepared, respond
from headrace.api.prompts import chat_text, check_sequences
from headrace.api.prompts import encode as encode_prompt
from headrace.api.reasoning import CLOSE, OPEN
from headrace.api.sampling import sampling_params
from headrace.api.schema import decode
from headrace.api.schema_chat import CHAT_DECODER, ChatRequest
from headrace.api.state import ServerState
from headrace.api.structured import requested_grammar
from headrace.api.submit import new_id, read_body
from headrace.api.tool_choice import ToolUse, tool_use
from headrace.api.tool_parser import OPEN as CALL_OPEN
from headrace.core.errors import InvalidRequest
from headrace.core.sampling import MAX_LOGPROBS, GrammarSpec, SamplingParams


async def chat_completions(state: ServerState, request: Request, meter: Meter) -> Response:
    """Answer a conversation, streamed or in one piece.

    Raises:
        HeadraceError: refused, with its HTTP face in `errors.as_api_error`.
    """
    return await respond(state, request, await prepare_chat(state, await read_body(request)), meter)


async def prepare_chat(state: ServerState, raw: bytes) -> Prepared:
    """Understand the body of a chat completion.

    Raises:
        HeadraceError: refused, with its HTTP face in `errors.as_api_error`.
    """
    chat = decode(CHAT_DECODER, raw)
    state.check_model(chat.model)
    _refuse_unsupported(chat)
    check_sequences(chat.n or 1)
    tools = tool_use(chat, state.hermes)
    grammar = tools.grammar(requested_grammar(chat))
    top_logprobs = _top_logprobs(chat)
    params = _params(state, chat, grammar, tools, top_logprobs)
    text, opened = await _prompt(state, chat, tools, grammar)
    prompt = await encode_prompt(state, text, "messages", bool(chat.add_special_tokens))
    request_id = new_id("chatcmpl")
    options = chat.stream_options
    spec = ChatSpec(
        common={
            "id": request_id,
            "created": int(time.time()),
            "model": state.model,
            "system_fingerprint": state.fingerprint,
            "service_tier": chat.service_tier,
        },
        n=params.n,
        hermes=tools.parse,
        parallel=tools.parallel,
        think=state.think and grammar is None,
        opened=opened,
        show_reasoning=chat.include_reasoning is not False,
        top_logprobs=top_logprobs,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        prompt_ids=prompt if chat.return_token_ids else None,
    )
    return Prepared(
        chat,
        request_id,
        [prompt],
        params,
        "messages",
        lambda meter: ChatWhole(spec, state.texts, meter),
        lambda meter: ChatStream(spec, state.texts, meter),
    )


async def _prompt(
    state: ServerState, chat: ChatRequest, tools: ToolUse, grammar: GrammarSpec | None
) -> tuple[str, bool]:
    """The prompt's text, and whether it ends inside `<think>`."""
    going_on = bool(chat.continue_final_message)
    text = await chat_text(
        state,
        chat.messages,
        tools.functions,
        add_generation_prompt=not going_on if chat.add_generation_prompt is None else chat.add_generation_prompt,
        continue_final_message=going_on,
        variables=chat.chat_template_kwargs,
    )
    opened = state.think and text.rfind(OPEN) > text.rfind(CLOSE) and not going_on
    if opened and grammar is not None:
        # The constraint holds from the first token on, so the thought the template has opened is over at once.
        return f"{text.rstrip()}\n\n{CLOSE}\n\n", False
    return text, opened and text.rstrip().endswith(OPEN)


def _params(
    state: ServerState, chat: ChatRequest, grammar: GrammarSpec | None, tools: ToolUse, top_logprobs: int | None
) -> SamplingParams:
    limit = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    try:
        params = sampling_params(chat, state.generator.defaults, limit, top_logprobs, grammar, state.info.vocab_size)
    except InvalidRequest as error:
        renamed = {"logprobs": "top_logprobs"}
        if chat.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        param = error.param or ""
        raise InvalidRequest(str(error), renamed.get(param, error.param), error.code) from None
    tags = ([CALL_OPEN] if tools.parse else []) + ([OPEN] if state.think else [])
    if any(state.tokenizer.token_id(tag) in state.tokenizer.special_ids for tag in tags):
        # Here the tags are special tokens; left out of the text there would be nothing to parse.
        return msgspec.structs.replace(params, skip_special_tokens=False)
    return params


def _top_logprobs(chat: ChatRequest) -> int | None:
    top = chat.top_logprobs
    if top is not None and not chat.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", "top_logprobs")
    return (top or 0) if chat.logprobs else None


def _refuse_unsupported(chat: ChatRequest) -> None:
    if chat.chat_template is not None:
        raise InvalidRequest("a request cannot bring its own chat template; use --chat-template", "chat_template")
    if chat.audio is not None or "audio" in (chat.modalities or ()):
        raise InvalidRequest("only text can be generated", "modalities")
