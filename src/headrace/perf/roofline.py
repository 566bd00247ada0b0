"""The least time a batch of requests can take on a device: fixed by the work, whatever the schedule.

    seconds = (linear FLOPs of every token that perfect prefix sharing leaves to compute
               + head FLOPs of every sampled row) / best calibrated GEMM rate at <= 512 rows
            + KV bytes of one reading of each sequence's KV per output token / torch.sum bandwidth

Attention FLOPs are left out and no overlap of compute and memory is assumed: on one pool of cores both serve the same
work. With p prompt and d output tokens a sequence's output tokens read p, p+1, .. p+d-1 tokens of KV, which is the
p*d + d^2/2 of BlendServe (arXiv 2411.16102, section 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headrace.perf.model_shape import ModelShape
from headrace.perf.overlap import overlapped
from headrace.perf.profile import DeviceProfile


@dataclass(frozen=True)
class Work:
    """What a batch asks for, with perfect prefix sharing.

    Attributes:
        prompt_tokens: tokens of all prompts.
        shared_tokens: prompt tokens that need no computation because another prompt begins the same way.
        output_tokens: tokens to generate; each is one row of the head.
        fed_tokens: output tokens that go through the layers: all but the last of each sequence.
        kv_bytes: bytes of one reading of each sequence's KV per output token.
    """

    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    fed_tokens: int
    kv_bytes: int

    @property
    def computed_tokens(self) -> int:
        """Rows that go through the layers."""
        return self.prompt_tokens - self.shared_tokens + self.fed_tokens


def shared_prefix_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Prompt tokens that perfect prefix sharing saves.

    The prompts are sorted; what a prompt shares with any other it shares with a neighbour, so the tokens of the prefix
    tree are all tokens minus the neighbours' longest common prefixes. At least one token of every prompt is computed,
    since its logits are needed.
    """
    rows = sorted(np.asarray(prompt, dtype=">u4").tobytes() for prompt in prompts)
    saved = 0
    for before, after in pairwise(rows):
        a, b = np.frombuffer(before, ">u4"), np.frombuffer(after, ">u4")
        size = min(len(a), len(b))
        different = np.flatnonzero(a[:size] != b[:size])
        common = int(different[0]) if len(different) else size
        saved += min(common, len(b) - 1)
    return saved


def work_of(prompts: Sequence[Sequence[int]], outputs: Sequence[int], shape: ModelShape) -> Work:
    """The work of a batch.

    Args:
        prompts: token ids of each prompt, at least one per prompt.
        outputs: tokens to generate for each prompt, at least 1.
        shape: the model.

    Raises:
        ValueError: the lengths differ, or a prompt or an output is empty.
    """
    if len(prompts) != len(outputs):
        raise ValueError(f"{len(prompts)} prompts but {len(outputs)} output lengths")
    if any(not len(prompt) for prompt in prompts) or any(count < 1 for count in outputs):
        raise ValueError("every prompt and every output needs at least one token")
    kv_bytes = 0
    for prompt, count in zip(prompts, outputs):
        contexts = np.arange(len(prompt), len(prompt) + count, dtype=np.int64)
        full = int(contexts.sum()) * (shape.layers - shape.window_layers)
        slid = int(np.minimum(contexts, shape.window).sum()) * shape.window_layers if shape.window_layers else 0
        kv_bytes += 2 * shape.kv_width * shape.kv_itemsize * (full + slid)
    return Work(
        prompt_tokens=sum(len(prompt) for prompt in prompts),
        shared_tokens=shared_prefix_tokens(prompts),
        output_tokens=sum(outputs),
        fed_tokens=sum(outputs) - len(outputs),
        kv_bytes=kv_bytes,
    )


def roofline_seconds(work: Work, shape: ModelShape, profile: DeviceProfile) -> float:
    """The formula above."""
    flops = work.computed_tokens * shape.linear_flops + work.output_tokens * shape.head_flops
    return flops / profile.best_gemm_rate(512) + work.kv_bytes / profile.sum_read


def optimum_seconds(compute: float, memory: float, profile: DeviceProfile) -> float:
    """The least time of a workload by the device's own overlap rule, whatever the order.

    With perfect sharing and an unlimited cache a workload is `compute` seconds of compute-bound work (each distinct
    prefix computed once) and `memory` seconds of memory-bound work, as `CostRates` counts them. On a device that runs
    both side by side the optimum is their overlapped time, which the profile's interference makes longer than the
    larger of the two (the "practical optimum" of BlendServe); on a CPU, whose one pool of cores serves both, their sum.
    """
    return overlapped(compute, memory, profile.overlap)
