"""What every layer's attention does in a step: wait for stored KV, write the new, attend, offer the new."""

from time import perf_counter
from typing import Any

from torch import Tensor

from headrace.core.plan import StepPlan
from headrace.engine.batch import StepBatch
from headrace.engine.kv_flow import KVSink, KVSource
from headrace.engine.kv_group import KVGroup
from headrace.kernels.attention import AttentionBackend


class AttentionStep:
    """The step context (`model.context.StepContext`) of one plan over one KV group.

    This is the layer-wise overlapped transmission: a layer waits only for its own stored KV, and its new KV is offered
    to the sink while the next layer computes. Nothing else in the engine knows about layers.

    Attributes:
        seconds: spent in attention so far; on a device only the time to ask for it.
    """

    __slots__ = ("_backend", "_flow", "_group", "_plan", "_prepared", "seconds")

    def __init__(
        self,
        plan: StepPlan,
        batch: StepBatch,
        group: KVGroup,
        backend: AttentionBackend,
        heads: int,
        flow: tuple[KVSource, KVSink] | None,
    ) -> None:
        self._plan = plan
        self._group = group
        self._backend = backend
        self._flow = flow
        self.seconds = 0.0
        self._prepared: Any = backend.plan(
            batch.cu_q,
            batch.kv_lens,
            batch.block_tables,
            batch.slots,
            num_heads=heads,
            num_kv_heads=len(group.shape.heads),
        )

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `model.context.StepContext.attend`."""
        flow = self._flow
        if flow is not None:
            flow[0].wait(self._plan, layer)
        k_planes, v_planes = self._group.planes(layer)
        begun = perf_counter()
        self._backend.write(self._prepared, k, v, k_planes, v_planes)
        out = self._backend.attend(self._prepared, q, k_planes, v_planes, scale=scale, window=window, softcap=softcap)
        self.seconds += perf_counter() - begun
        if flow is not None:
            flow[1].offer(self._plan, layer)
        return out
