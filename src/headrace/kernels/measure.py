"""Measures the attention kernels of this machine; numbers for `headrace bench` and the decision records."""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional

from headrace.kernels.attention import AttentionBackend, Planes, backend_for

HEADS, KV_HEADS, HEAD_DIM, LAYERS, PAGE_SIZE = 9, 3, 64, 30, 16
"""SmolLM2-135M with the default page size."""


class _Pool:
    """Planes of some layers and sequences whose pages lie in random order, filled with random KV."""

    def __init__(self, backend: AttentionBackend, lengths: Sequence[int], layers: int, kv_dtype: str) -> None:
        self.backend = backend
        self.lengths = np.array(lengths, np.int32)
        pages = -(-self.lengths // PAGE_SIZE)
        order = np.random.default_rng(0).permutation(int(pages.sum()))
        self.tables = np.zeros((len(lengths), int(pages.max())), np.int32)
        at = 0
        for i, n in enumerate(pages):
            self.tables[i, :n] = order[at : at + n]
            at += int(n)
        self.layers = [
            (
                self._plane(at, backend.k_page_shape(PAGE_SIZE, HEAD_DIM), kv_dtype),
                self._plane(at, backend.v_page_shape(PAGE_SIZE, HEAD_DIM), kv_dtype),
            )
            for _ in range(layers)
        ]
        self.bytes = int(self.lengths.sum()) * KV_HEADS * HEAD_DIM * 2 * self.layers[0][0].itemsize * layers

    def _plane(self, pages: int, shape: tuple[int, int], kv_dtype: str) -> Planes:
        values = torch.empty(KV_HEADS, pages, *shape, dtype=getattr(torch, kv_dtype)).uniform_(-1, 1)
        wanted = self.backend.plane_dtype(kv_dtype)
        if isinstance(wanted, torch.dtype):
            return values.to(self.backend.device)
        return values.view(torch.int16).numpy().view(wanted) if values.itemsize == 2 else values.numpy()

    def step(self, rows: Sequence[int]) -> Callable[[], None]:
        """A call that attends the last `rows[i]` positions of each sequence in all layers."""
        cu_q = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        plan = self.backend.plan(
            cu_q, self.lengths, self.tables, np.full(cu_q[-1], -1), num_heads=HEADS, num_kv_heads=KV_HEADS
        )
        q = torch.randn(int(cu_q[-1]), HEADS, HEAD_DIM, device=self.backend.device)
        planes = self.layers[0][0]
        if isinstance(planes, torch.Tensor):  # a device computes in the type it stores
            q = q.to(planes.dtype)

        def call() -> None:
            for k, v in self.layers:
                self.backend.attend(plan, q, k, v, scale=HEAD_DIM**-0.5)
            if self.backend.device != "cpu":
                torch.cuda.synchronize()

        return call


def alternate(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each call; the calls take turns, so that noise of the machine meets all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, seconds in zip(calls, times):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def attention_flops(rows: int, context: int) -> float:
    """FLOPs (a multiply-add counts 2) of causal attention of `rows` positions after `context` older ones, one layer."""
    return 4.0 * HEADS * HEAD_DIM * (rows * context + rows * (rows + 1) / 2)


def measure(
    backend: AttentionBackend | None = None, *, kv_dtype: str = "float32", rounds: int = 7, layers: int = LAYERS
) -> dict[str, float]:
    """Rates of decode and prefill attention at the shapes of SmolLM2-135M, each layer with KV of its own.

    Args:
        backend: what to measure; default: the CPU's.
        kv_dtype: stored type of KV.
        rounds: repetitions; medians are taken.
        layers: layers per step.

    Returns:
        `sum_gb_s`: bandwidth of `torch.sum` over 256 MB. `decode_8k_ms`, `decode_8k_gb_s`, `decode_8k_share`: all
        layers of one step of one 8,192-token context, its KV bytes per second, and that as a share of `sum_gb_s`.
        `decode_batch_gb_s`: 48 sequences of 40 to 700 tokens. `prefill_0_gflop_s`, `prefill_3072_gflop_s`: 512 new
        rows after 0 and 3,072 tokens; `prefill_3072_sdpa_gflop_s`: torch over contiguous KV, for comparison.
    """
    backend = backend or backend_for("cpu")
    numbers: dict[str, float] = {}
    block = torch.ones(64 << 20, device=backend.device)
    long = _Pool(backend, [8192], layers, kv_dtype)
    total, decode = alternate([block.sum, long.step([1])], rounds)
    numbers["sum_gb_s"] = block.nbytes / total / 1e9
    numbers["decode_8k_ms"] = decode * 1e3
    numbers["decode_8k_gb_s"] = long.bytes / decode / 1e9
    numbers["decode_8k_share"] = numbers["decode_8k_gb_s"] / numbers["sum_gb_s"]
    del long, block

    lengths = np.random.default_rng(1).integers(40, 701, 48).tolist()
    batch = _Pool(backend, lengths, layers, kv_dtype)
    (decode,) = alternate([batch.step([1] * len(lengths))], rounds)
    numbers["decode_batch_ms"] = decode * 1e3
    numbers["decode_batch_gb_s"] = batch.bytes / decode / 1e9
    del batch

    some = min(layers, 4)
    fresh, late = _Pool(backend, [512], some, kv_dtype), _Pool(backend, [3584], some, kv_dtype)
    first, second, dense = alternate(
        [fresh.step([512]), late.step([512]), _contiguous(3584, 512, some, backend.device)], rounds
    )
    numbers["prefill_0_gflop_s"] = some * attention_flops(512, 0) / first / 1e9
    numbers["prefill_3072_gflop_s"] = some * attention_flops(512, 3072) / second / 1e9
    numbers["prefill_3072_sdpa_gflop_s"] = some * attention_flops(512, 3072) / dense / 1e9
    return numbers


def _contiguous(length: int, rows: int, layers: int, device: str) -> Callable[[], None]:
    """Torch's attention of the last `rows` of a context over KV that lies contiguous, heads not expanded."""
    q = torch.randn(1, HEADS, rows, HEAD_DIM, device=device)
    keys = [torch.randn(1, KV_HEADS, length, HEAD_DIM, device=device) for _ in range(2 * layers)]
    at = torch.arange(length, device=device)
    mask = at[None, :] <= at[length - rows :, None]

    def call() -> None:
        for k, v in zip(keys[::2], keys[1::2]):
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return call
