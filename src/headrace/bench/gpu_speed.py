"""How fast a device decodes and prefills: forward passes alone, with random weights and no files."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from headrace.bench.forced import ForcedRun
from headrace.bench.random_decoder import random_llama
from headrace.core.sampling import SamplingParams
from headrace.engine.batch import StepBatch
from headrace.engine.graphs import DecodePath, GraphRecorder
from headrace.engine.kv_group import KVGroup, KVShape
from headrace.engine.sampling import Sampler, SampleRow
from headrace.kernels.attention import AttentionBackend, backend_for

PAGE_SIZE = 16


def measure(
    config: dict[str, Any],
    device: str,
    dtype: str,
    batches: Sequence[int] = (1, 8, 32, 64),
    context: int = 1024,
    prefill: int = 2048,
    steps: int = 20,
) -> dict[str, Any]:
    """Rates of a random Llama.

    Args:
        config: keywords of `LlamaConfig`.
        device: `cuda`; or `cpu`, where the fixed-shape steps are not captured.
        dtype: of weights, computation and KV.
        batches: sequences that decode together, each with `context` tokens.
        context: tokens of KV per sequence.
        prefill: tokens of one prefill step.
        steps: repetitions; medians are taken.

    Returns:
        `decode_B_any_ms`, `decode_B_fixed_ms`: a step of B sequences with the host launching every kernel, and of fixed
        shape (on CUDA a replayed graph), up to greedy tokens on the host. `decode_B_tokens_per_s` and
        `decode_B_bandwidth_share`: of the latter, the share being bytes of weights and KV per second over what
        `torch.sum` reads. `prefill_tokens_per_s`, `prefill_tflop_s`. `attention_gb_s`, `attention_share`: decode
        attention of the largest batch in one layer on the way that takes any plan. `sample_ms`: the engine's sampler on
        the largest batch.
    """
    longest = max(batches)
    decoder = random_llama(config, getattr(torch, dtype), torch.device(device))
    shape, backend = decoder.shape, backend_for(device, name="auto" if device == "cuda" else "torch")
    kv = KVShape(range(shape.num_layers), range(shape.kv_heads), shape.head_dim, PAGE_SIZE, dtype)
    each = -(-max(context + 1, prefill) // PAGE_SIZE)
    # One sequence is prefilled with more tokens than the others hold.
    group = KVGroup(kv, (longest - 1) * -(-(context + 1) // PAGE_SIZE) + each, backend, device)
    tokens = [[5] * max(context + 1, prefill), *([[5] * (context + 1)] * (longest - 1))]
    run = ForcedRun(decoder, group, backend, tokens)
    recorder = GraphRecorder(decoder.device) if device == "cuda" else None
    path = DecodePath(decoder, group, backend, longest, context + 1, recorder)
    bandwidth = _bandwidth(device)
    found: dict[str, Any] = {
        "model": f"random Llama, {shape.params / 1e9:.2f} billion weights, {shape.num_layers} layers, {dtype}",
        "attention": backend.name,
        "context": context,
        "sum_gb_s": round(bandwidth / 1e9, 1),
    }
    for count in batches:
        batch = run.batch([(i, context, 1) for i in range(count)])
        plain = _seconds(partial(_greedy, run.compute, batch), device, steps)
        fixed = _seconds(partial(_greedy, path.run, batch), device, steps)
        moved = (shape.linear_params + shape.head_params) * shape.itemsize + count * (context + 1) * kv.token_bytes
        found |= {
            f"decode_{count}_any_ms": round(plain * 1e3, 3),
            f"decode_{count}_fixed_ms": round(fixed * 1e3, 3),
            f"decode_{count}_tokens_per_s": round(count / fixed, 1),
            f"decode_{count}_bandwidth_share": round(moved / fixed / bandwidth, 3),
        }
    row = torch.zeros(1, dtype=torch.int64, device=device)
    chunk = run.batch([(0, 0, prefill)])
    seconds = _seconds(lambda: run.compute(chunk, row).cpu(), device, min(steps, 5))
    flops = 2.0 * shape.linear_params * prefill + 2.0 * prefill**2 * shape.heads * shape.head_dim * shape.num_layers
    found |= {
        "prefill_tokens_per_s": round(prefill / seconds, 1),
        "prefill_tflop_s": round(flops / seconds / 1e12, 2),
    }
    widest = run.batch([(i, context, 1) for i in range(longest)])
    q = torch.randn(longest, shape.heads, shape.head_dim, device=device).to(getattr(torch, dtype))
    rate = longest * (context + 1) * kv.token_bytes / shape.num_layers / _attention(widest, q, group, backend, steps)
    return found | {
        "attention_gb_s": round(rate / 1e9, 2),
        "attention_share": round(rate / bandwidth, 3),
        "sample_ms": round(_sampler(path.run(widest), steps) * 1e3, 3),
    }


def _greedy(compute: Callable[[StepBatch], torch.Tensor], batch: StepBatch) -> torch.Tensor:
    return compute(batch).argmax(-1).cpu()


def _attention(batch: StepBatch, q: torch.Tensor, group: KVGroup, backend: AttentionBackend, steps: int) -> float:
    """Seconds of one layer's attention on the way that takes any plan."""
    plan = backend.plan(
        batch.cu_q,
        batch.kv_lens,
        batch.block_tables,
        batch.slots,
        num_heads=q.shape[1],
        num_kv_heads=len(group.shape.heads),
    )
    planes = group.planes(group.shape.layers[0])
    return _seconds(lambda: backend.attend(plan, q, *planes, scale=q.shape[2] ** -0.5), q.device.type, steps)


def _sampler(logits: torch.Tensor, steps: int) -> float:
    """Seconds of the engine's sampler for greedy rows, the way of the logits to the host included."""
    count, vocabulary = logits.shape
    sampler, params = Sampler(vocabulary, (), None, 0), SamplingParams(temperature=0.0)
    prompt = np.array([5], np.int32)
    rows = [
        SampleRow(params=params, seed=0, position=1, prompt=prompt, output=prompt[:0], state=sampler.open(params, [5]))
        for _ in range(count)
    ]
    return _seconds(lambda: sampler.sample(logits, rows), logits.device.type, steps)


def _bandwidth(device: str) -> float:
    """Bytes/s of `torch.sum`, over 1 GB on CUDA."""
    numbers = torch.ones((1 << 28) if device == "cuda" else (1 << 22), device=device)
    return numbers.nbytes / _seconds(lambda: torch.sum(numbers), device, 10)


def _seconds(call: Callable[[], object], device: str, rounds: int) -> float:
    """Median seconds of a call, until the device is done with it; three calls go before."""
    times = []
    for number in range(rounds + 3):
        start = time.perf_counter()
        with torch.inference_mode():
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            times.append(time.perf_counter() - start)
    return median(times)
