"""Forwards in flight: plans go through spans of layers in order, several at once."""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.core.plan import StepPlan
from headrace.engine.batch import StepBatch
from headrace.engine.kv_flow import NotArrived
from headrace.model.context import StepContext
from headrace.model.decoder import Decoder, Forward


class Span(Protocol):
    """A range of layers that runs somewhere. One forward at a time, in the order they were started."""

    @property
    def local(self) -> bool:
        """True when `finish` computes in this thread; False when the work goes on elsewhere after `start`."""
        ...

    @property
    def layers(self) -> range:
        """Which layers."""
        ...

    def start(self, fwd: Forward) -> None:
        """Hand a forward to the span."""
        ...

    def finish(self, fwd: Forward, interrupt: Callable[[], bool] | None) -> bool:
        """Return True once the span's layers are applied; False if `interrupt` said to give up between layers."""
        ...


class LocalSpan:
    """Layers of this process's decoder."""

    def __init__(self, decoder: Decoder, layers: range) -> None:
        self._decoder = decoder
        self._layers = layers

    @property
    def local(self) -> bool:
        """Computes in `finish`."""
        return True

    @property
    def layers(self) -> range:
        """Which layers."""
        return self._layers

    def start(self, fwd: Forward) -> None:
        """Nothing to do before `finish`."""

    def finish(self, fwd: Forward, interrupt: Callable[[], bool] | None) -> bool:
        """Run the layers; with `interrupt`, one by one, asking it in between."""
        if interrupt is None:
            self._decoder.run(fwd, self._layers.start, self._layers.stop)
            return True
        for layer in self._layers:
            if interrupt():
                return False
            self._decoder.run(fwd, layer, layer + 1)
        return True


@dataclass(slots=True)
class InFlight:
    """A plan between spans.

    Attributes:
        plan: what it computes.
        batch: its arrays.
        forward: where it stands.
        stage: the next span.
        started: that span has it already.
    """

    plan: StepPlan
    batch: StepBatch
    forward: Forward
    stage: int = 0
    started: bool = False


class Pipeline:
    """Moves forwards through spans. A span takes forwards in order, so a prompt's later chunk finds its earlier KV.

    Args:
        decoder: embeds, and knows the layers.
        spans: cover the layers in order.
    """

    def __init__(self, decoder: Decoder, spans: Seq[Span]) -> None:
        covered = [layer for span in spans for layer in span.layers]
        if covered != list(range(decoder.shape.num_layers)):
            raise ValueError(f"spans cover layers {covered}, not 0..{decoder.shape.num_layers - 1} in order")
        self._decoder = decoder
        self._spans = spans
        self._queue: deque[InFlight] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, plan: StepPlan, batch: StepBatch, context: StepContext) -> None:
        """Embed a plan's rows and put it in flight."""
        device = self._decoder.device
        ids = torch.from_numpy(batch.input_ids).to(device, non_blocking=True)
        positions = torch.from_numpy(batch.positions).to(device, non_blocking=True)
        forward = self._decoder.begin(ids, positions, context)
        self._queue.append(InFlight(plan, batch, forward))
        self._start_remote()

    def collect(self, interrupt: Callable[[], bool] | None = None) -> tuple[InFlight, bool]:
        """Bring the oldest forward through its last span; meanwhile the others move on as far as they can.

        Args:
            interrupt: asked between layers of an offline plan that is alone in flight; True gives it up.

        Returns:
            The plan in flight, and False if it was given up.

        Raises:
            NotArrived: stored KV that one of those in flight needs does not come; see `give_up`.
        """
        last = len(self._spans)
        while self._queue[0].stage < last:
            item = self._next()
            span = self._spans[item.stage]
            may_stop = interrupt if item.plan.service == "offline" and len(self._queue) == 1 else None
            if not item.started:
                span.start(item.forward)
                item.started = True
            try:
                done = span.finish(item.forward, may_stop)
            except NotArrived:
                item.started = False
                raise
            if not done:
                return self._queue.popleft(), False
            item.stage += 1
            item.started = False
            self._start_remote()
        return self._queue.popleft(), True

    def give_up(self) -> list[InFlight]:
        """Take everything out of flight, oldest first, once no span computes any of it."""
        for item in self._queue:
            if item.started:
                with contextlib.suppress(NotArrived):  # given up anyway
                    self._spans[item.stage].finish(item.forward, None)
        items = list(self._queue)
        self._queue.clear()
        return items

    def _start_remote(self) -> None:
        """Hand every forward that stands before an idle remote span to it, so that it computes while we do."""
        ahead = len(self._spans) + 1
        for item in self._queue:
            if item.stage < min(ahead, len(self._spans)) and not item.started:
                span = self._spans[item.stage]
                if not span.local:
                    span.start(item.forward)
                    item.started = True
            ahead = item.stage

    def _next(self) -> InFlight:
        """The forward to work on: of those with local work that is free to run the furthest behind, so that spans after
        it are fed soon; where there is none, wait for the oldest."""
        ahead = len(self._spans) + 1
        found = self._queue[0]
        for item in self._queue:
            if item.stage < min(ahead, len(self._spans)) and self._spans[item.stage].local:
                found = item
            ahead = item.stage
        return found


def cut(layers: int, parts: int) -> list[range]:
    """Split layers into contiguous ranges of nearly equal length."""
    edges = [layers * part // parts for part in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges) if b > a]
