"""A group with some layers and heads loads its share of parts that were saved with other layers and heads."""

from pathlib import Path

import numpy as np
import pytest

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.kv_group import KVGroup, KVShape
from headrace.engine.loading import Loads, part_of
from headrace.engine.outcome import LoadOrder
from headrace.engine.sequence import Sequence
from headrace.kernels.attention import backend_for
from headrace.store.layout import KVLayout
from headrace.store.part import PartId, PartRange
from headrace.store.save import SaveSpec
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.dir import DirTier

LAYERS, HEADS, CHUNK, PAGE, DIM = 6, 4, 16, 8, 24
LAYOUT = KVLayout("a model", LAYERS, HEADS, DIM, "float32", CHUNK)
PIECES = {
    "whole": [PartRange(0, LAYERS, 0, HEADS)],
    "heads": [PartRange(0, LAYERS, 0, 2), PartRange(0, LAYERS, 2, HEADS)],
    "layers": [PartRange(0, 2, 0, HEADS), PartRange(2, LAYERS, 0, HEADS)],
    "its own": [PartRange(1, 5, 1, 3)],
}


def save(store: KVStore, key: bytes, chunk: int, part: PartRange, kv: np.ndarray) -> None:
    """`kv`: layer, K and V, head, token, element."""

    def pack(layer: int, record: memoryview) -> None:
        into = np.frombuffer(record, np.float32).reshape(2, len(part.heads), CHUNK, DIM)
        into[:] = kv[layer][:, part.first_head : part.last_head]

    saving = store.save(SaveSpec(PartId(key, part), CHUNK, chunk, 1.0), pack)
    assert saving is not None
    for layer in part.layers:
        saving.layer_ready(layer)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", ["numba", "torch"])
def test_what_the_group_has_comes_from_parts_of_any_shape(tmp_path: Path, name: str, pieces: str) -> None:
    backend = backend_for("cpu", name=name)
    backend.warmup(PAGE, "float32")
    kv = np.random.default_rng(1).random((2, LAYERS, 2, HEADS, CHUNK, DIM), np.float32)
    store = KVStore(LAYOUT, [DirTier(tmp_path, 1 << 26)], StoreSettings("all"))
    try:
        keys = store.keys(np.arange(2 * CHUNK, dtype=np.int32), "")
        for chunk, key in enumerate(keys):
            for part in PIECES[pieces]:
                save(store, key, chunk, part, kv[chunk])
        assert store.flush(60)
        group = KVGroup(KVShape(range(1, 5), range(1, 3), DIM, PAGE, "float32"), 16, backend)
        seq = Sequence(Request(id="a", prompt=list(range(40)), params=SamplingParams(max_tokens=1)), 0, 64)
        seq.pages[:] = [9, 4, 7, 2]
        found = store.lookup(keys, part_of(group))
        assert len(found) == 2
        loads = Loads(store, group, backend, CHUNK)
        loads.start([(LoadOrder(seq, PAGE, 2 * CHUNK, True), found)])
        item = loads.of("a")
        assert item is not None
        for layer in group.shape.layers:
            item.wait(layer)
            both = backend.read_pages(*group.planes(layer), np.array(seq.pages, np.int64))
            for nth, stored in enumerate(both):
                wanted = np.concatenate([kv[chunk, layer, nth, 1:3] for chunk in range(2)], axis=1)
                np.testing.assert_array_equal(stored[:, PAGE:], wanted[:, PAGE:])
                assert not stored[:, :PAGE].any(), "what the pool has already is not written again"
            everything = backend.read_pages(*group.planes(layer), np.arange(16))
            assert all(np.count_nonzero(x) <= 2 * 3 * PAGE * DIM for x in everything), "nothing else was written"
        assert loads.end(item)[0] == 2 * CHUNK
    finally:
        store.close()
