"""Threads, the compiled code's cache, and the arithmetic under the kernels."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit
from paged_batch import PagedBatch, worst

from headrace.kernels import openmp
from headrace.kernels.attention import backend_for
from headrace.kernels.cuda import page_lists
from headrace.kernels.measure import measure
from headrace.kernels.memory import exp2


def test_two_threads_may_attend_at_once() -> None:
    """Each with a step of its own, teams of two inside: several plans are in flight later."""
    batches = [PagedBatch(backend_for("cpu", threads=2), [(1, 500), (30, 90)], seed=seed) for seed in (1, 2)]
    wanted = [torch.cat(batch.attend()) for batch in batches]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            if not torch.equal(torch.cat(batches[number].attend()), wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_more_threads_than_work() -> None:
    paged = PagedBatch(backend_for("cpu", threads=7), [(1, 3)])
    assert worst(paged.attend(), paged.dense()) < 1e-5


def test_the_team_is_torchs() -> None:
    """A second copy of libgomp would bring a second pool of threads for the same cores."""
    assert openmp.check(0) == torch.get_num_threads()
    path = openmp.loaded_runtimes()[0]
    assert Path(torch.__path__[0]) in Path(path).parents


_USE_BOTH = """
from headrace.kernels.attention import backend_for
from paged_batch import PagedBatch, worst
for page_size in (16, 8):
    paged = PagedBatch(backend_for("cpu", threads=1), [(1, 300), (20, 90)], dim=80, page_size=page_size)
    assert worst(paged.attend(), paged.dense()) < 1e-5, page_size
"""


def test_machine_code_is_kept_between_processes(tmp_path: Path) -> None:
    """Two tile shapes, compiled by different processes, work in a third, which compiles nothing: no file changes."""
    warm = "from headrace.kernels.attention import backend_for; backend_for('cpu', threads=1).warmup({}, 'float32')"
    environment = {**os.environ, "HEADRACE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    seen = []
    for program in (warm.format(16), warm.format(8), _USE_BOTH):
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        seen.append({file.name: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb[ci]")})
    assert len(seen[0]) == 8  # four kernels, each with its index
    assert len(seen[1]) == 9
    assert seen[1] == seen[2]


@njit
def _powers(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        out[i] = exp2(x[i])


def test_powers_of_two() -> None:
    x = np.concatenate([-np.linspace(0, 126, 200_001), [-np.inf, -1e30, -127.0, np.nan]]).astype(np.float32)
    out = np.empty_like(x)
    _powers(x, out)
    exact = np.exp2(x[:-4].astype(np.float64))
    assert out[0] == 1.0
    assert np.abs(out[:-4] / exact - 1).max() < 2e-7
    assert out[-4:-1].tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(out[-1])


def test_scores_of_any_size() -> None:
    """Neither large scores nor equal ones overflow."""
    paged = PagedBatch(backend_for("cpu"), [(3, 600)])
    paged.q[0] *= 1000
    assert worst(paged.attend(), paged.dense()) < 1e-2  # one token takes all; its neighbours differ by rounding of q k
    paged.q[0] *= 0
    assert worst(paged.attend(), paged.dense()) < 1e-6


def test_page_lists_of_flashinfer() -> None:
    tables = np.array([[4, 2, -5], [-9, 7, 8]], np.int32)
    indptr, indices, last = page_lists(np.array([17, 48], np.int32), tables, 16, 8)
    assert indptr.tolist() == [0, 2, 5]
    assert indices.tolist() == [4, 2, 0, 7, 7]
    assert last.tolist() == [1, 16]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_measure_gives_rates(kv_dtype: str) -> None:
    numbers = measure(kv_dtype=kv_dtype, rounds=1, layers=1)
    assert set(numbers) >= {"sum_gb_s", "decode_8k_share", "decode_batch_gb_s", "prefill_3072_gflop_s"}
    assert all(value > 0 for value in numbers.values())
