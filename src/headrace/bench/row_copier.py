"""Where measurements of the store alone deliver to: memory that no cache of a core holds, as an engine's pool is."""

import numpy as np

from headrace.store.layout import KVLayout
from headrace.store.native.library import NativeCopy, copy_rows
from headrace.store.part import PartId


class RowCopier:
    """Copies records to memory for one chunk, over and over. See `store.load.NativeDeliver`."""

    def __init__(self, layout: KVLayout) -> None:
        payload = layout.payload_bytes(layout.kv_heads, layout.chunk_tokens)
        self._planes = np.empty((layout.layers, payload), np.uint8)

    def __call__(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
        """See `Deliver`."""
        new = np.frombuffer(records, np.uint8).reshape(last - first, -1)
        np.copyto(self._planes[first:last], new[:, : self._planes.shape[1]])

    def copy(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> NativeCopy:
        """See `NativeDeliver.copy`."""
        payload = self._planes.shape[1]
        return copy_rows(records, self._planes[first:last].data.cast("B"), payload, last - first)

    def arrived(self, chunk: int, part: PartId, first: int, last: int) -> None:
        """Nothing to note."""
