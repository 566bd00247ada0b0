"""The layers' arguments, rebuilt from positions without running the decoder's own forward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: (positional, keyword) arguments of one layer after the hidden states.
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: Runs the decoder's forward with recorders at some positions and returns each layer's call.
Record = Callable[[Tensor], list[Call]]

#: Larger tables are not kept; the decoder's own forward prepares the arguments then.
_TABLE_BYTES = 64 << 20
_FIRST_ROWS = 2048


@dataclass(frozen=True)
class _Row:
    """Stands for row `position` of a table."""

    table: int


class _Positions:
    """Stands for the positions themselves, [1, T]."""


class ArgumentTables:
    """What every layer is given, as a function of the rows' positions.

    Transformers computes a step's rotary tables (and nothing else) from its positions. They are computed once for
    positions 0..n, by the model's own code and some positions at a time (it makes hidden states for them), and looked
    up per step; n doubles when a longer sequence comes.

    Args:
        record: the way to the model's own arguments.
        longest: positions the engine serves.
        device: where positions live.

    Raises: ValueError if some argument is not such a function; the model's forward must run each step then.
    """

    def __init__(self, record: Record, longest: int, device: torch.device) -> None:
        self._record, self._longest, self._device = record, longest, device
        self._tables: list[Tensor] = []
        self._plans: list[Call] = []
        self._plan_of: list[int] = []
        self._rows = 0
        # On other devices the greatest position of a step is not known without waiting for it.
        self._grow(min(_FIRST_ROWS, longest) if device.type == "cpu" else longest)
        self._check()

    def calls(self, positions: Tensor) -> list[Call] | None:
        """Each layer's call at these positions [T]; None: they lie beyond what a table may hold."""
        if self._device.type == "cpu":
            rows = int(positions.max()) + 1
            if rows > self._rows and not self._grow(max(rows, min(2 * self._rows, self._longest))):
                return None
        looked_up = [table.index_select(1, positions) for table in self._tables]
        made = [_fill(plan, looked_up, positions[None]) for plan in self._plans]
        return [made[plan] for plan in self._plan_of]

    @property
    def nbytes(self) -> int:
        """Bytes of the tables now."""
        return sum(table.nbytes for table in self._tables)

    def _grow(self, rows: int) -> bool:
        if self._rows and self.nbytes // self._rows * rows > _TABLE_BYTES:
            return False
        blocks: list[list[Tensor]] = []
        for start in range(self._rows, rows, _FIRST_ROWS):
            positions = torch.arange(start, min(start + _FIRST_ROWS, rows), device=self._device)
            blocks.append(self._read(positions))
        kept = [[table] for table in self._tables] or [[] for _ in blocks[0]]
        if any(len(block) != len(kept) for block in blocks):
            raise ValueError("the layers' arguments differ in number from position to position")
        self._tables = [torch.cat([*old, *new], 1) for old, new in zip(kept, zip(*blocks, strict=True), strict=True)]
        self._rows = rows
        return True

    def _read(self, positions: Tensor) -> list[Tensor]:
        """What the model gives its layers at some positions, as rows of tables; the plans are those of every block."""
        tables: list[Tensor] = []
        seen: dict[int, Any] = {}
        plans: list[Call] = []
        plan_of = []
        for call in self._record(positions):
            plan = _template(call, positions, tables, seen)
            if plan not in plans:
                plans.append(plan)
            plan_of.append(plans.index(plan))
        if self._plan_of and (plans, plan_of) != (self._plans, self._plan_of):
            raise ValueError("the layers' arguments differ in kind from position to position")
        self._plans, self._plan_of = plans, plan_of
        return tables

    def _check(self) -> None:
        """The tables say what the model says at scattered positions."""
        last = self._rows - 1
        positions = torch.tensor([last, 0, last // 3, last // 2], device=self._device)
        ours, theirs = self.calls(positions), self._record(positions)
        if ours is None or not all(map(_alike, ours, theirs)):
            raise ValueError("the layers' arguments are not a function of each row's position")


def _template(value: Any, positions: Tensor, tables: list[Tensor], seen: dict[int, Any]) -> Any:
    """`value` with each tensor replaced by what it is looked up from."""
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = _leaf(value, positions, tables)
        return seen[id(value)]
    if isinstance(value, dict):
        return {key: _template(part, positions, tables, seen) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_template(part, positions, tables, seen) for part in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"a layer takes a {type(value).__name__}")


def _leaf(value: Tensor, positions: Tensor, tables: list[Tensor]) -> Any:
    rows = len(positions)
    if value.shape == (1, rows) and value.dtype == torch.int64 and torch.equal(value[0], positions):
        return _Positions
    if value.dim() == 3 and value.shape[:2] == (1, rows) and value.is_floating_point():
        tables.append(value.contiguous())
        return _Row(len(tables) - 1)
    raise ValueError(f"a layer takes a tensor of shape {tuple(value.shape)}")


def _fill(plan: Any, rows: list[Tensor], positions: Tensor) -> Any:
    if isinstance(plan, _Row):
        return rows[plan.table]
    if plan is _Positions:
        return positions
    if isinstance(plan, dict):
        return {key: _fill(part, rows, positions) for key, part in plan.items()}
    if isinstance(plan, tuple):
        return tuple([_fill(part, rows, positions) for part in plan])
    return plan


def _alike(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == two.shape and bool(torch.allclose(one.float(), two.float(), atol=1e-6, rtol=1e-6))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_alike(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(_alike, one, two))
    return bool(one == two)
