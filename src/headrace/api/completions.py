"""POST /v1/completions, and lines of a batch for that route."""

import time

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.completion_answer import CompletionSpec, CompletionStream, CompletionWhole
from headrace.api.meter import Meter
from headrace.api.prepared import Prepared, respond
from headrace.api.prompts import MAX_SEQUENCES, check_length, check_sequences, check_tokens
from headrace.api.prompts import encode as encode_prompt
from headrace.api.sampling import sampling_params
from headrace.api.schema import decode
from headrace.api.schema_completion import COMPLETION_DECODER, CompletionRequest
from headrace.api.state import ServerState
from headrace.api.structured import requested_grammar
from headrace.api.submit import new_id, read_body
from headrace.core.errors import InvalidRequest
from headrace.core.sampling import SamplingParams


async def completions(state: ServerState, request: Request, meter: Meter) -> Response:
    """Continue one or more prompts, streamed or in one piece.

    Raises:
        HeadraceError: refused, with its HTTP face in `errors.as_api_error`.
    """
    return await respond(state, request, await prepare_completion(state, await read_body(request)), meter)


async def prepare_completion(state: ServerState, raw: bytes) -> Prepared:
    """Understand the body of a text completion.

    Raises:
        HeadraceError: refused, with its HTTP face in `errors.as_api_error`.
    """
    body = decode(COMPLETION_DECODER, raw)
    state.check_model(body.model)
    if body.suffix:
        raise InvalidRequest("suffix is not supported; this model only continues a text", "suffix")
    params, discard = _params(state, body)
    if len(body.prompt) > MAX_SEQUENCES and not isinstance(body.prompt, str):
        check_length(len(body.prompt), "items", state.info.max_model_len, "prompt")
    given = split_prompt(body.prompt)
    check_sequences(len(given) * params.n)
    prompts = [await _tokens(state, prompt, body.add_special_tokens is not False) for prompt in given]
    texts: list[str] = []
    if body.echo:
        texts = [p if isinstance(p, str) else state.tokenizer.decode(p) for p in given]
    options = body.stream_options
    request_id = new_id("cmpl")
    spec = CompletionSpec(
        common={
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.model,
            "system_fingerprint": state.fingerprint,
            "service_tier": body.service_tier,
        },
        prompts=prompts,
        texts=texts,
        n=params.n,
        echo=bool(body.echo),
        discard_output=discard,
        logprobs=body.logprobs,
        show_prompt_logprobs=body.prompt_logprobs is not None,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        return_ids=bool(body.return_token_ids),
    )
    return Prepared(
        body,
        request_id,
        prompts,
        params,
        "prompt",
        lambda meter: CompletionWhole(spec, state.texts, meter),
        lambda meter: CompletionStream(spec, state.texts, meter),
    )


def split_prompt(prompt: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """The prompts of a request, each a text or token ids.

    Raises:
        InvalidRequest: an empty list, or one that mixes kinds.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` must not be empty", "prompt")
    numbers = [item for item in prompt if isinstance(item, int)]
    if len(numbers) == len(prompt):
        return [numbers]
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return list(texts)
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) == len(prompt):
        return list(lists)
    raise InvalidRequest("`prompt` must hold only strings, only token ids, or only lists of token ids", "prompt")


def _params(state: ServerState, body: CompletionRequest) -> tuple[SamplingParams, bool]:
    """Sampling parameters, and whether the one token they ask for is not wanted (`max_tokens: 0` with echo)."""
    discard = body.max_tokens == 0 and bool(body.echo)
    params = sampling_params(
        body,
        state.generator.defaults,
        1 if discard else body.max_tokens,
        body.logprobs,
        requested_grammar(body),
        state.info.vocab_size,
    )
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        params = structs.replace(params, prompt_logprobs=wanted)
    return params, discard


async def _tokens(state: ServerState, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
    if isinstance(prompt, str):
        return await encode_prompt(state, prompt, "prompt", add_special_tokens)
    if not prompt:
        raise InvalidRequest("`prompt` holds an empty list of tokens", "prompt")
    check_length(len(prompt), "tokens", state.info.max_model_len, "prompt")
    check_tokens(prompt, state.info.vocab_size, "prompt")
    return prompt
