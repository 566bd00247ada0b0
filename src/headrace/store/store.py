"""The front door of the store: look up, load, save, flush."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.store.layout import KVLayout
from headrace.store.load import Deliver, FoundChunk, Load
from headrace.store.part import PartRange
from headrace.store.save import Pack, Save, SaveSpec
from headrace.store.settings import StoreSettings
from headrace.store.stats import StoreStats
from headrace.store.tiers.tier import Tier


class KVStore:
    """KV of prefixes in several tiers at once.

    All methods may be called from any thread. `lookup`, `lease`, `leased`, `release` and `save` ask catalogs, which
    takes microseconds where this process owns the tier and a round trip over a unix socket where another does.

    Args:
        layout: of the model's KV.
        tiers: where parts lie, fastest first where it matters to nobody; closed by `close`.
        settings: how it behaves.

    Raises:
        TierError: a tier cannot be listed.
    """

    def __init__(self, layout: KVLayout, tiers: Sequence[Tier], settings: StoreSettings | None = None) -> None:
        raise NotImplementedError

    def keys(self, tokens: NDArray[np.int32], salt: str = "", known: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of the full chunks of a token sequence.

        Args:
            tokens: `[n]`.
            salt: the request's `cache_salt`.
            known: keys of its first chunks, where they were asked for before.
        """
        raise NotImplementedError

    def lookup(self, keys: Sequence[bytes], wanted: PartRange, count: bool = True) -> list[FoundChunk]:
        """The longest prefix of chunks whose parts cover `wanted`, all tiers merged.

        Args:
            keys: of the chunks, in order.
            wanted: layers and heads.
            count: whether the replication policy and the counters see it; False when a request asks again.
        """
        raise NotImplementedError

    def load(self, chunks: Sequence[FoundChunk], wanted: PartRange, deliver: Deliver) -> Load:
        """Begin to load chunks; `deliver` is called in reading threads, see `load.Deliver`.

        The loads of one step should come as one `load_batch`, so that early layers of all of them arrive first.
        """
        raise NotImplementedError

    def load_batch(self, loads: Sequence[tuple[Sequence[FoundChunk], PartRange, Deliver]]) -> list[Load]:
        """Begin all loads of a step at once, layer-major over all of them."""
        raise NotImplementedError

    def save(self, spec: SaveSpec, pack: Pack) -> Save | None:
        """Begin to save a part; call `Save.layer_ready` for each of its layers as they become complete.

        Returns:
            None when the policy says no, the part is there or on its way already, or the queue is full; each is counted.
        """
        raise NotImplementedError

    def lease(self, keys: Sequence[bytes]) -> int:
        """Say that this store computes these chunks now; returns how many, from the first, are now its own."""
        raise NotImplementedError

    def leased(self, keys: Sequence[bytes]) -> list[bool]:
        """For each chunk: does another process (or another store in this one) compute it now?"""
        raise NotImplementedError

    def release(self, keys: Sequence[bytes]) -> None:
        """This store's leases on these chunks end."""
        raise NotImplementedError

    def forward(self, running: bool) -> None:
        """The engine begins or ends a forward pass: writes flow while one runs, and when none came for a while."""
        raise NotImplementedError

    def stats(self) -> StoreStats:
        """Counters since the store was opened."""
        raise NotImplementedError

    def flush(self, timeout: float) -> bool:
        """Write what waits to be written, whether or not a forward pass runs.

        Returns:
            True when everything ready was written; False when `timeout` seconds were not enough.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give up what is not written (call `flush` before), end all threads, let go of catalogs and tiers."""
        raise NotImplementedError
