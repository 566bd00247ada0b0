"""Builds the sampling kernels, or loads them from the cache.

Numba's cache notices a change in the file of the outermost function alone, so the folder's name carries a digest of all
sources that the kernels are made of. They are not attention's: work on one must not rebuild the other.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import config

from headrace.core import paths
from headrace.kernels import sampling_rows

_SOURCES = ("memory.py", "vectors.py", "sampling_weights.py", "sampling_truncate.py", "sampling_rows.py")


def _cache_folder() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return paths.home() / "kernels" / f"sampling-{digest.hexdigest()[:16]}"


@functools.cache
def kernels() -> tuple[Any, Any]:
    """`sample_kernel` and `logprobs_kernel` as C functions; `.address` of each is its entry."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(_cache_folder())
    try:
        sample, logprobs = (
            numba.cfunc(types.void(types.CPointer(numba.from_dtype(record))), cache=True, error_model="numpy")(function)
            for record, function in (
                (sampling_rows.SAMPLE_RECORD, sampling_rows.sample_kernel),
                (sampling_rows.LOGPROBS_RECORD, sampling_rows.logprobs_kernel),
            )
        )
    finally:
        config.CACHE_DIR = before
    return sample, logprobs
