"""What the step loop tells a backend before KV moves between pages and the store."""

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.kv_group import KVGroup, KVShape
from headrace.engine.loading import Batch, Loads
from headrace.engine.outcome import LoadOrder
from headrace.engine.saving import ChunkSource, Saves
from headrace.engine.sequence import Sequence as Seq
from headrace.kernels.torch_attention import TorchAttention
from headrace.store.load import FoundChunk, FoundPart
from headrace.store.part import PartRange
from headrace.store.save import Pack, SaveSpec

CHUNK, PAGE, LAYERS = 16, 8, 2
WHOLE = PartRange(0, LAYERS, 0, 1)


class Told:
    """Streams, a store and its saves that write down in which order they are spoken to."""

    packed = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pages_free(self) -> None:
        self.calls.append("free")

    def kv_written(self) -> None:
        self.calls.append("written")

    def load_batch(self, loads: Batch) -> Sequence[Any]:
        self.calls.append(f"load {sum(len(chunks) for chunks, _, _ in loads)}")
        return [None for _ in loads]

    def save(self, spec: SaveSpec, pack: Pack) -> "Told":
        return self

    def layer_ready(self, layer: int) -> None:
        self.calls.append(f"layer {layer}")

    def cancel(self) -> None:
        self.calls.append("cancel")


class Pool:
    """Pages that are lent without end."""

    lent, total = 0, 1000

    def lend(self, pages: list[int]) -> None:
        pass


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def group(told: Told) -> KVGroup:
    shape = KVShape(range(LAYERS), range(1), 8, PAGE, "float32")
    return KVGroup(shape, 16, TorchAttention("cpu", told))  # type: ignore[arg-type]


def found(count: int) -> list[FoundChunk]:
    return [FoundChunk(bytes([number]) * 16, CHUNK, (FoundPart(WHOLE, (0,)),)) for number in range(count)]


def test_before_loads_that_pages_are_free(told: Told, group: KVGroup) -> None:
    loads = Loads(told, group, TorchAttention("cpu", told), CHUNK)  # type: ignore[arg-type]
    sequences = []
    for name in "ab":
        seq = Seq(Request(id=name, prompt=list(range(60)), params=SamplingParams(max_tokens=1)), 0, 64)
        seq.pages[:] = [9, 4, 7, 2]
        sequences.append(seq)
    loads.start([(LoadOrder(sequences[0], 0, 2 * CHUNK, True), found(2))])
    loads.start_split(LoadOrder(sequences[1], 0, 2 * CHUNK, True), found(2), 1)
    assert told.calls == ["free", "load 2", "free", "load 1", "load 1"]


def test_before_saves_that_kv_is_written(told: Told, group: KVGroup) -> None:
    saves = Saves(told, Pool(), group, TorchAttention("cpu", told), CHUNK)  # type: ignore[arg-type]
    items = [saves.begin(ChunkSource(bytes([n]) * 16, None, n, [n, n + 1], b"", 1.0)) for n in range(3)]
    first, second, third = (item for item in items if item is not None)
    saves.submit(5, [first, second])
    saves.offer(5, 0)
    saves.offer(6, 0)  # a plan that completes nothing
    saves.whole(third)
    assert told.calls == ["written", "layer 0", "layer 0", "written", "layer 0", "layer 1"]
