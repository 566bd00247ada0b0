"""A process that saves as fast as it can until it is killed: python heavy_saves.py FOLDER SEED."""

import sys
from pathlib import Path

import numpy as np

from headrace.store.layout import KVLayout
from headrace.store.part import PartId, PartRange
from headrace.store.save import SaveSpec
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.dir import DirTier

LAYOUT = KVLayout("a model", layers=6, kv_heads=2, head_dim=64, dtype="float32", chunk_tokens=128)
WHOLE = PartRange(0, 6, 0, 2)
PART = LAYOUT.part_bytes(6, 2, 128)
CAPACITY = 20 * PART
SHAPE = (2, 2, 128, 64)


def content(key: bytes, layer: int) -> np.ndarray:
    """What a layer of a chunk must hold."""
    return np.random.default_rng([*key, layer]).random(SHAPE, dtype=np.float32)


def open_store(folder: Path) -> KVStore:
    return KVStore(LAYOUT, [DirTier(folder / n, CAPACITY, name=n) for n in ("a", "b")], StoreSettings("all"))


def main() -> None:
    store = open_store(Path(sys.argv[1]))
    tokens = np.random.default_rng(int(sys.argv[2])).integers(0, 1000, 128 * 1000).astype(np.int32)
    print("saving", flush=True)
    for chunk, key in enumerate(store.keys(tokens)):

        def pack(layer: int, record: memoryview, key: bytes = key) -> None:
            np.frombuffer(record, np.float32).reshape(SHAPE)[:] = content(key, layer)

        while (save := store.save(SaveSpec(PartId(key, WHOLE), 128, chunk, 1.0), pack)) is None:
            store.flush(1.0)
        for layer in WHOLE.layers:
            save.layer_ready(layer)


if __name__ == "__main__":
    main()
