"""Where stored KV comes from and new KV goes to, layer by layer: the seam for the global store."""

from collections.abc import Sequence as Seq
from typing import Protocol

from headrace.core.plan import StepPlan


class NotArrived(Exception):
    """Stored KV that a plan needs does not come: the plan is given up, nothing of it counts."""


class KVSource(Protocol):
    """Brings stored KV into the pool ahead of the layers that read it."""

    def wait(self, plan: StepPlan, layer: int) -> None:
        """Return once the KV that the plan's sequences load for this layer lies in the pool.

        Raises:
            NotArrived: it does not come.
        """
        ...


class KVSink(Protocol):
    """Takes new KV out of the pool behind the layers that wrote it."""

    def offer(self, plan: StepPlan, layer: int) -> None:
        """The plan's new KV of this layer is in the pool; saving it must not block."""
        ...


class RecordedFlow:
    """Remembers the calls, for tests of the order in which the attention function makes them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def wait(self, plan: StepPlan, layer: int) -> None:
        """Record ("wait", plan, layer)."""
        self.calls.append(("wait", plan.id, layer))

    def offer(self, plan: StepPlan, layer: int) -> None:
        """Record ("offer", plan, layer)."""
        self.calls.append(("offer", plan.id, layer))

    def of_plan(self, plan: int) -> Seq[tuple[str, int]]:
        """The calls of one plan as (what, layer)."""
        return [(what, layer) for what, owner, layer in self.calls if owner == plan]
