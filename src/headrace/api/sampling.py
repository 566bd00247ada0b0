"""From a request's fields to sampling parameters, service class and priority."""

from typing import Any

import msgspec

from headrace.api.schema import GenerationFields
from headrace.core.errors import InvalidRequest
from headrace.core.request import ServiceClass
from headrace.core.sampling import GrammarSpec, SamplingParams

MAX_PRIORITY = 1 << 31
MAX_CACHE_SALT = 1024
MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 256
MAX_STOP_LENGTH = 4096

_TIERS: dict[str, ServiceClass] = {
    "auto": "online",
    "default": "online",
    "priority": "online",
    "scale": "online",
    "flex": "offline",
}

# Parameters of vLLM that would change the output and that we do not have: the values that ask for nothing, and the
# way out.
_ABSENT: dict[str, tuple[tuple[Any, ...], str]] = {
    "bad_words": (([],), "give their tokens a logit_bias of -100"),
    "allowed_token_ids": ((), "use structured_outputs"),
    "truncate_prompt_tokens": ((), "shorten the prompt on your side"),
    "logits_processors": (([],), "use logit_bias or structured_outputs"),
    "prompt_embeds": (([],), "send text or token ids"),
    "length_penalty": ((1.0,), "it belongs to beam search, which is not there either"),
    "early_stopping": ((False,), "it belongs to beam search, which is not there either"),
    "thinking_token_budget": ((), "use max_tokens"),
}

_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logit_bias",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)


def sampling_params(
    request: GenerationFields,
    defaults: SamplingParams,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: GrammarSpec | None,
    vocab_size: int,
) -> SamplingParams:
    """The parameters of a request; what it leaves out comes from `defaults`.

    Args:
        request: the request's body.
        defaults: of the model's generation config.
        max_tokens: as the route understands it; None: the default.
        logprobs: alternatives per output token, as the route understands it.
        grammar: constraint on the text.
        vocab_size: for the ids in `logit_bias` and `stop_token_ids`.

    Raises:
        InvalidRequest: a value is out of range.
    """
    _refuse_unsupported(request)
    given = {name: getattr(request, name) for name in _PLAIN if getattr(request, name) is not None}
    if len(given.get("logit_bias", ())) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens", "logit_bias")
    if request.stop is not None:
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        if any(len(text) > MAX_STOP_LENGTH for text in stop):
            raise InvalidRequest(f"stop strings may have at most {MAX_STOP_LENGTH} characters", "stop")
        given["stop"] = stop
    if request.stop_token_ids is not None:
        if len(request.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequest(f"at most {MAX_STOP_IDS} stop_token_ids", "stop_token_ids")
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    if max_tokens is not None:
        given["max_tokens"] = min(max_tokens, 1 << 31)  # any larger number means the same and fits every message
    params = msgspec.structs.replace(defaults, logprobs=logprobs, grammar=grammar, **given)
    params.check(vocab_size)
    return params


def service_class(request: GenerationFields) -> ServiceClass:
    """`service_tier: "flex"` is work that may wait."""
    if request.service_tier is None:
        return "online"
    if request.service_tier not in _TIERS:
        raise InvalidRequest(
            f"service_tier must be one of {', '.join(_TIERS)}, got {request.service_tier[:100]!r}", "service_tier"
        )
    return _TIERS[request.service_tier]


def priority(request: GenerationFields) -> int:
    """Lower runs first, as vLLM's `priority`."""
    value = request.priority or 0
    if not -MAX_PRIORITY <= value < MAX_PRIORITY:
        raise InvalidRequest(f"priority must fit 32 bits, got {value}", "priority")
    return value


def cache_salt(request: GenerationFields) -> str:
    """Prefixes are shared only among requests with the same salt."""
    salt = request.cache_salt or ""
    if len(salt) > MAX_CACHE_SALT:
        raise InvalidRequest(f"cache_salt may have at most {MAX_CACHE_SALT} characters", "cache_salt")
    return salt


def _refuse_unsupported(request: GenerationFields) -> None:
    if request.use_beam_search:
        raise InvalidRequest("beam search is not supported; sample with n instead", "use_beam_search")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of is not supported; ask for n and choose on your side", "best_of")
    for name, (neutral, way_out) in _ABSENT.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"{name} is not supported; {way_out}", name)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs is not available in streams", "prompt_logprobs")
