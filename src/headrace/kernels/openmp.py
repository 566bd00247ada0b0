"""Runs a compiled kernel on the threads that torch already has.

Numba's own OpenMP layer is linked to the system's libgomp, which may be missing, while torch's wheel carries a copy of
its own: two pools of threads for the same cores. So kernels here are plain C functions `void (void *)`, entered by each
thread of a team of torch's runtime (`GOMP_parallel`); the call costs a microsecond and holds no interpreter lock. One
thread needs no team: the function is called directly.

Threads of a team spin for a while before they sleep, by default so long that a busy neighbour process (the front) costs
a step several times its length. The engine's process should be started with `GOMP_SPINCOUNT=2000` in its environment
(libgomp reads it when it is loaded): no slower on idle cores, several times faster on shared ones.
"""

import ctypes
import functools
from collections.abc import Callable

import torch

from headrace.core.errors import ConfigError

_Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _team() -> Callable[[int, int, int, int], None]:
    """`GOMP_parallel(function, argument, threads, flags)` of the OpenMP runtime that torch uses.

    Raises:
        ConfigError: torch has no OpenMP runtime of that interface.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        raise ConfigError("this torch build runs without OpenMP; install the wheel from PyPI or use --threads 1")
    for path in loaded_runtimes():
        try:
            start = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL).GOMP_parallel
        except (OSError, AttributeError):
            continue
        start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        start.restype = None
        return start
    raise ConfigError("found no OpenMP runtime with GOMP_parallel in this process; use --threads 1")


def loaded_runtimes() -> list[str]:
    """Files of the OpenMP runtimes in this process, torch's own first."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        files = {line.split(maxsplit=5)[-1].strip() for line in maps}
    found = [
        file for file in files if any(name in file.rsplit("/", 1)[-1] for name in ("libgomp", "libiomp5", "libomp"))
    ]
    return sorted(found, key=lambda file: (f"{torch.__path__[0]}/" not in file, file))


@functools.cache
def _serial(kernel: int) -> Callable[[int], None]:
    return _Kernel(kernel)


def run(kernel: int, argument: int, threads: int) -> None:
    """Enters the C function at address `kernel` with `argument` on `threads` threads and waits for all of them."""
    if threads == 1:
        _serial(kernel)(argument)
    else:
        _team()(kernel, argument, threads, 0)


def check(threads: int) -> int:
    """The thread count to use (0: torch's own), after making sure that a team of that size can be formed.

    Raises:
        ConfigError: there is no usable OpenMP runtime.
    """
    threads = threads or torch.get_num_threads()
    if threads > 1:
        _team()
    return threads
