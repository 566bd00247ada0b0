"""Token sampling: from rows of logits to tokens, log-probabilities and structured output.

`check_grammar` needs neither torch nor Numba, so names are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.sampling.grammar import check_grammar
    from headrace.engine.sampling.row import RowState, SampleResult, SampleRow
    from headrace.engine.sampling.sampler import Sampler

__all__ = ["RowState", "SampleResult", "SampleRow", "Sampler", "check_grammar"]

_HOME = {"check_grammar": "grammar", "RowState": "row", "SampleResult": "row", "SampleRow": "row", "Sampler": "sampler"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
