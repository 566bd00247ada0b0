"""Compiles Numba functions into C functions and keeps the machine code between runs.

The code lies under `HEADRACE_HOME/kernels/<digest>`; the digest covers all sources of the kernel and the versions of
Numba and llvmlite, because Numba itself notices a change only in the file of the outermost function. Numba adds the CPU
model to the key, so a home folder shared by different machines is safe; files appear by rename, so processes may share
it.

Numba tells functions apart in machine code by a number that counts from 0 in each process (argument types do not always
do: records are named by such a number too). Kernels compiled by different processes and loaded into one could then call
each other's functions, so here the count starts at a random number.
"""

import functools
import hashlib
import itertools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numba
from numba.core import config
from numba.core.bytecode import FunctionIdentity

from headrace.core import paths

FunctionIdentity._unique_ids = itertools.count(secrets.randbits(48))


@functools.cache
def cache_folder(sources: tuple[str, ...]) -> Path:
    """Where compiled kernels of these very sources (files of this folder) are kept."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in ("compiled.py", *sources):
        digest.update(Path(__file__).with_name(source).read_bytes())
    return paths.home() / "kernels" / digest.hexdigest()[:16]


def c_function(signature: Any, function: Callable[..., Any], sources: tuple[str, ...], **options: Any) -> Any:
    """Compiles `function` (or loads it from the cache) as a C function; `.address` of the result is its entry.

    The result must be kept alive as long as the address is used.

    Args:
        signature: Numba's type of the function.
        function: what to compile.
        sources: all files of this folder that the machine code is made of.
        options: for Numba's compiler, `fastmath` for one.
    """
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_folder(sources))
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy", **options)(function)
    finally:
        config.CACHE_DIR = before
