"""Builds the sampling kernels, or loads them from the cache."""

import functools
from typing import Any

import numba
from numba import types

from headrace.kernels import sampling_rows
from headrace.kernels.compiled import c_function

_SOURCES = ("memory.py", "vectors.py", "sampling_weights.py", "sampling_truncate.py", "sampling_rows.py")


@functools.cache
def kernels() -> tuple[Any, Any]:
    """`sample_kernel` and `logprobs_kernel` as C functions; `.address` of each is its entry."""
    sample, logprobs = (
        c_function(types.void(types.CPointer(numba.from_dtype(record))), function, _SOURCES)
        for record, function in (
            (sampling_rows.SAMPLE_RECORD, sampling_rows.sample_kernel),
            (sampling_rows.LOGPROBS_RECORD, sampling_rows.logprobs_kernel),
        )
    )
    return sample, logprobs
