"""A step as two nano-batches that run side by side: decode rows on one CUDA stream, prompt rows on another.

Attention of decode rows reads KV and leaves the multiprocessors idle, products of prompt rows compute and leave the
memory idle (NanoFlow, arXiv 2408.12757; BlendServe, arXiv 2411.16102). A plan's chunks belong to different sequences
and no chunk needs another's KV of the same step, so both halves go through the layers without waiting for each other;
each layer is launched for one and then for the other, on its own stream, and the device takes what fits beside what
runs. Without streams (CPU) the halves run in turn and give the same. Not run on a GPU yet.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from headrace.core.plan import StepPlan
from headrace.engine.attention_step import AttentionStep
from headrace.engine.batch import StepBatch
from headrace.engine.kv_group import KVGroup
from headrace.engine.pipeline import LocalSpan
from headrace.kernels.attention import AttentionBackend
from headrace.model.decoder import Decoder, Forward

#: A half of fewer rows is not worth its launches.
MINIMUM_ROWS = 8


class TwinStep:
    """The context of a plan whose decode rows, the first of the packed row, and prompt rows are attended apart.

    Args:
        plan: decode chunks, then prefill chunks.
        batch: its arrays.
        group: its KV.
        backends: for each half one, since a backend may keep what it has prepared for one step at a time.
        heads: query heads.

    Attributes:
        edge: rows of the first half.
        halves: their contexts.
    """

    __slots__ = ("edge", "halves")

    def __init__(
        self,
        plan: StepPlan,
        batch: StepBatch,
        group: KVGroup,
        backends: tuple[AttentionBackend, AttentionBackend],
        heads: int,
    ) -> None:
        chunks = sum(chunk.phase == "decode" for chunk in plan.chunks)
        self.edge = int(batch.cu_q[chunks])
        parts = (part(batch, 0, chunks), part(batch, chunks, len(plan.chunks)))
        self.halves = [AttentionStep(plan, half, group, backend, heads, None) for half, backend in zip(parts, backends)]

    @property
    def seconds(self) -> float:
        """See `AttentionStep.seconds`."""
        return sum(half.seconds for half in self.halves)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `model.context.StepContext.attend`: all rows at once, the halves in turn."""
        outs = [
            half.attend(layer, q[own], k[own], v[own], scale, window, softcap)
            for half, own in zip(self.halves, (slice(0, self.edge), slice(self.edge, len(q))))
        ]
        return torch.cat(outs)


class TwinSpan(LocalSpan):
    """Layers of this process's decoder, for plans of two halves both at once.

    Args:
        decoder: the model.
        layers: of it.
    """

    def __init__(self, decoder: Decoder, layers: range) -> None:
        super().__init__(decoder, layers)
        self._streams = [torch.cuda.Stream(decoder.device) for _ in range(2)] if decoder.device.type == "cuda" else []

    def finish(self, fwd: Forward, interrupt: Callable[[], bool] | None) -> bool:
        """See `Span.finish`."""
        step = fwd.step
        if not isinstance(step, TwinStep):
            return super().finish(fwd, interrupt)
        halves = self._split(fwd, step)
        with self._joined():
            for layer in self._layers:
                if interrupt is not None and interrupt():
                    return False  # the forward stands where it was; what was written is written again
                for half, context in zip(halves, self._contexts()):
                    with context:
                        self._decoder.run(half, layer, layer + 1)
        fwd.hidden = torch.cat([half.hidden for half in halves])
        fwd.layer = self._layers.stop
        return True

    def _split(self, fwd: Forward, step: TwinStep) -> list[Forward]:
        rows = (slice(0, step.edge), slice(step.edge, len(fwd.hidden)))
        return [
            self._decoder.begin_span(fwd.hidden[own], fwd.positions[own], context, fwd.layer)
            for own, context in zip(rows, step.halves)
        ]

    def _contexts(self) -> list[AbstractContextManager[object]]:
        if not self._streams:
            return [nullcontext(), nullcontext()]
        return [torch.cuda.stream(stream) for stream in self._streams]

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """What runs inside begins after what was asked for before, and what is asked for afterwards waits for it."""
        if self._streams:
            current = torch.cuda.current_stream(self._decoder.device)
            for stream in self._streams:
                stream.wait_stream(current)
        try:
            yield
        finally:
            for stream in self._streams:
                current.wait_stream(stream)


def worth_splitting(plan: StepPlan) -> bool:
    """Whether both halves have rows enough."""
    decode = sum(chunk.length for chunk in plan.chunks if chunk.phase == "decode")
    return min(decode, plan.tokens - decode) >= MINIMUM_ROWS


def part(batch: StepBatch, first: int, last: int) -> StepBatch:
    """The chunks `first..last-1` of a batch as one of their own; what is sampled is the whole's business."""
    rows = slice(int(batch.cu_q[first]), int(batch.cu_q[last]))
    return replace(
        batch,
        sequences=batch.sequences[first:last],
        input_ids=batch.input_ids[rows],
        positions=batch.positions[rows],
        cu_q=batch.cu_q[first : last + 1] - batch.cu_q[first],
        kv_lens=batch.kv_lens[first:last],
        block_tables=batch.block_tables[first:last],
        slots=batch.slots[rows],
        sample_rows=batch.sample_rows[:0],
        sampled=batch.sampled[:0],
    )
