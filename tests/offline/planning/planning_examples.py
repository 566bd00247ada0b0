"""Jobs and devices to plan for."""

import dataclasses

import numpy as np
from perf_examples import SMOL, profile

from headrace.offline.planning.requests import JobRequests
from headrace.perf.density import CostRates
from headrace.perf.presets import accelerator

CPU, GPU = profile(), accelerator("A100", peak=True)
MODEL = SMOL
RATES = CostRates.of(CPU, MODEL)


def random_job(seed: int, requests: int = 60, documents: int = 4) -> tuple[JobRequests, np.ndarray]:
    """Prompts of shared documents with short answers and lone prompts with long ones, shuffled; and true lengths."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 1000, 48) for _ in range(documents)]
    prompts, limits, lengths, groups = [], [], [], []
    for _ in range(requests):
        kind = int(rng.integers(0, 2))
        own = rng.integers(0, 1000, int(rng.integers(1, 24)))
        prompts.append(np.concatenate((texts[rng.integers(documents)], own)) if kind else own)
        limits.append(16 if kind else 128)
        lengths.append(int(rng.integers(1, limits[-1] + 1)))
        groups.append(kind)
    return JobRequests.of([p.tolist() for p in prompts], limits, groups), np.array(lengths, np.int64)


def changed(requests: JobRequests, **columns: np.ndarray) -> JobRequests:
    return dataclasses.replace(requests, **columns)
