"""What planning a large batch takes: a file of prompts as token ids is read and planned, each in a process on one core.

Prompts come in groups that share half of their tokens, in random order, with limits of all sizes. Planning is all that
`headrace batch run` does before the first request: the prefix tree, densities, sample and order; lengths are estimated.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from headrace.bench.local_engine import peak_rss_mb
from headrace.bench.progress import progress
from headrace.core.errors import HeadraceError
from headrace.offline.jobs.lines import COMPLETIONS

_VOCABULARY = 32_000
_GROUP = 16
_LIMITS = (8, 64, 256, 1024)
_KV_TOKENS = 400_000


@dataclass(frozen=True)
class Planned:
    """One file.

    Attributes:
        requests: in it.
        file_mb: its size.
        read_s: from the file to token ids in memory.
        plan_s: from these to the first request.
        peak_mb: resident memory of the process at most.
    """

    requests: int
    file_mb: float
    read_s: float
    plan_s: float
    peak_mb: float


def measure(counts: Sequence[int], prompt_tokens: int, seed: int = 0) -> dict[str, Any]:
    """Write, read and plan a file of each size.

    Args:
        counts: requests, ascending.
        prompt_tokens: of a prompt on average.
        seed: of tokens and order.

    Raises:
        HeadraceError: a process failed.
    """
    found = []
    with (
        TemporaryDirectory(prefix="headrace-bench-") as folder,
        progress("planning", len(counts)) as advance,
    ):
        for count in counts:
            path = Path(folder) / "requests.jsonl"
            write(path, count, prompt_tokens, seed)
            found.append(_planned(path))
            path.unlink()
            advance(1)
    per_request = [(one.read_s + one.plan_s) / one.requests for one in found]
    return {
        "sizes": [asdict(one) for one in found],
        "total_s": [round(one.read_s + one.plan_s, 2) for one in found],
        "seconds_per_request_last_over_first": round(per_request[-1] / per_request[0], 3),
        "prompt_tokens": prompt_tokens,
    }


def write(path: Path, count: int, prompt_tokens: int, seed: int = 0) -> None:
    """A batch file of so many requests."""
    rng = np.random.default_rng(seed)
    words = np.array([str(number) for number in range(_VOCABULARY)], object)
    half = max(1, prompt_tokens // 2)
    groups = -(-count // _GROUP)
    order = rng.permutation(groups * _GROUP)[:count]
    with path.open("w", encoding="ascii") as file:
        for number in order.tolist():
            shared = np.random.default_rng((seed, number // _GROUP)).integers(1, _VOCABULARY, half)
            own = rng.integers(1, _VOCABULARY, int(rng.integers(half // 2 + 1, half + half // 2 + 2)))
            prompt = ",".join(words[np.concatenate([shared, own])])
            file.write(
                f'{{"custom_id":"r{number}","method":"POST","url":"{COMPLETIONS}","body":{{"model":"default",'
                f'"prompt":[{prompt}],"max_tokens":{_LIMITS[number // _GROUP % len(_LIMITS)]}}}}}\n'
            )


def _planned(path: Path) -> Planned:
    done = subprocess.run([sys.executable, "-m", __name__, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise HeadraceError(f"planning ended with code {done.returncode}: {done.stderr[-500:]}")
    return Planned(**json.loads(done.stdout.splitlines()[-1]))


def _plan(path: Path) -> Planned:
    """In a process of its own, which stays on one core."""
    from headrace.offline.plan_input import read_plan_input
    from headrace.offline.planning.admission import make_admission
    from headrace.perf.model_config import preset
    from headrace.perf.presets import accelerator

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    shape = preset("llama-3-8b", "bfloat16")
    assert shape is not None
    profile = accelerator("A100", "bfloat16")
    begun = time.perf_counter()
    given = read_plan_input(path)
    read = time.perf_counter()
    admission = make_admission("blend", given.requests, profile, shape, _KV_TOKENS, max_seqs=256, step_tokens=2048)
    admission.admit()
    ended = time.perf_counter()
    size = round(path.stat().st_size / 1e6, 1)
    return Planned(len(given.ids), size, round(read - begun, 2), round(ended - read, 2), round(peak_rss_mb(), 1))


if __name__ == "__main__":
    print(json.dumps(asdict(_plan(Path(sys.argv[1])))))
