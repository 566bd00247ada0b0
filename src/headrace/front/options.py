"""The keyword arguments of `LLM` and `AsyncLLM`, and what they take for a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, InvalidRequest
from headrace.core.foreign import way_out
from headrace.core.sampling import SamplingParams
from headrace.core.settings import build, nearest, settings_of
from headrace.front.tokenizer import Tokenizer

Prompt: TypeAlias = str | list[int] | Mapping[str, Any]
"""A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

DEFAULT_TOKENS = 16

_ALIASES = {
    "enable_prefix_caching": "prefix_caching",
    "block_size": "page_size",
    "kv_cache_dtype": "kv_dtype",
    "kv_cache_memory_bytes": "kv_memory",
}


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an engine from keyword arguments: fields of the tree, or vLLM's names for them.

    Raises:
        ConfigError: an unknown name (the nearest is suggested) or a wrong value.
    """
    settings = {setting.name: setting for setting in settings_of(EngineConfig)}
    values: dict[str, Any] = {"model": model}
    for given, value in options.items():
        name = _ALIASES.get(given, given)
        if name not in settings or name == "model":
            hint = way_out(given) or nearest(given, [*settings, *_ALIASES])
            raise ConfigError(f"unknown engine option {given!r}{hint}")
        if name in values:
            raise ConfigError(f"option {given!r} is given twice, under two names")
        if value is not None:  # as vLLM has it: None means the default
            values[name] = settings[name].accept(value, given)
    return build(EngineConfig, values)


def plain_defaults(defaults: SamplingParams) -> SamplingParams:
    """The parameters of a `generate` that names none: the model's, ending after 16 tokens as in vLLM and OpenAI's API.

    A text that is merely continued has no end of its own, so without a limit it would fill the context.
    """
    if defaults.max_tokens is not None:  # the model's makers said how long
        return defaults
    return msgspec.structs.replace(defaults, max_tokens=DEFAULT_TOKENS)


def as_prompts(prompts: "Prompt | Sequence[Prompt]") -> list[Prompt]:
    """Several prompts or one, as a list; a list of ints is one prompt.

    Raises:
        InvalidRequest: one of them is of no such kind.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if _is_tokens(prompts):
        return [cast("list[int]", prompts)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"a prompt must be text or token ids, got {type(prompts).__name__}", "prompt")
    return list(cast("Sequence[Prompt]", prompts))


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """Text (None where token ids were given) and token ids of one prompt.

    Raises:
        InvalidRequest: it is of no kind we know.
    """
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return encode_prompt(list(prompt["prompt_token_ids"]), tokenizer)
        if "prompt" in prompt:
            return encode_prompt(prompt["prompt"], tokenizer)
        raise InvalidRequest("a prompt given as a dict needs the key 'prompt' or 'prompt_token_ids'", "prompt")
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, list) and (not prompt or _is_tokens(prompt)):
        return None, prompt
    raise InvalidRequest(f"a prompt must be text or a list of token ids, got {type(prompt).__name__}", "prompt")


def _is_tokens(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    )
