"""Environment variables of an engine process; they must be set before torch is imported."""

import os

SPIN_COUNT = "2000"


def worker_environment(threads: int, device: str | None = None) -> dict[str, str]:
    """This process's environment with what an engine needs.

    Args:
        threads: CPU threads of the engine; 0: as many as there are cores.
        device: the accelerator that it may use, as `CUDA_VISIBLE_DEVICES` names it; None: all.
    """
    environment = dict(os.environ)
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    # Waiting OpenMP threads spin for a moment only: on a shared machine the default makes steps tens of times slower.
    environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    environment["TOKENIZERS_PARALLELISM"] = "false"  # the engine's tokenizer only serves grammars
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment
