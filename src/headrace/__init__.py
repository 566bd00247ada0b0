"""Headrace: a serving system for large language models that keeps accelerators from waiting.

The names exported here are the Python API. They are imported lazily, so ``import headrace`` (and every
command that needs no model, such as ``headrace models list``) does not pay for importing torch.
"""

from typing import TYPE_CHECKING, Any

from headrace.core.sampling import GrammarSpec, SamplingParams
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.front.async_llm import AsyncLLM
    from headrace.front.llm import LLM

__all__ = ["LLM", "AsyncLLM", "GrammarSpec", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from headrace.front.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from headrace.front.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
