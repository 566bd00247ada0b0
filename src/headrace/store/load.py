"""What a reader is asked for and what it gives back: the contract between the store and whoever loads KV."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headrace.core.errors import HeadraceError
from headrace.store.native.library import NativeCopy
from headrace.store.part import PartId, PartRange

#: Called in a reading thread for each unit of adjacent layers that was read and proven: number of the chunk within the
#: load, part, first model layer, the layer after the last, and the records of these layers one behind the other. A
#: record is K then V, `[heads, tokens, head_dim]` each, and padding to `layout.ALIGNMENT`; `records_in` takes them
#: apart. The memory is only valid during the call. It must be quick to give up the interpreter lock, and do that once
#: rather than for each record, and it may not raise.
Deliver = Callable[[int, PartId, int, int, memoryview], None]


@runtime_checkable
class NativeDeliver(Protocol):
    """A `Deliver` whose copying is machine code: then it is done in the very call that reads and proves a unit.

    A reading thread so wins the interpreter lock once for each unit (`docs/decisions/0016`).
    """

    def __call__(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> None:
        """See `Deliver`; called where `copy` had nothing."""
        ...

    def copy(self, chunk: int, part: PartId, first: int, last: int, records: memoryview) -> NativeCopy | None:
        """What copies the records, once they are there: called before a unit is read, each time that it is tried.

        What it returns is called at most once among all tries of a unit, when its bytes are proven, and never once
        `Load.cancel` has returned.
        """
        ...

    def arrived(self, chunk: int, part: PartId, first: int, last: int) -> None:
        """The records were copied. May not raise."""
        ...


def records_in(first: int, last: int, records: memoryview, payload_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """Layers and their records, padding left out, of what `Deliver` gets.

    Args:
        first: first layer.
        last: the layer after the last.
        records: of these layers.
        payload_bytes: bytes of a record without padding, see `KVLayout.payload_bytes`.
    """
    step = len(records) // (last - first)
    for layer in range(first, last):
        yield layer, records[(layer - first) * step :][:payload_bytes]


class LoadFailed(HeadraceError):
    """Some chunk of a load could be had from no tier; a miss, not an error for the user.

    Attributes:
        good_chunks: chunks from the first that did arrive whole.
    """

    def __init__(self, good_chunks: int, why: str) -> None:
        super().__init__(why)
        self.good_chunks = good_chunks


@dataclass(frozen=True, slots=True)
class FoundPart:
    """A part and the tiers that hold it (their numbers, in the order of configuration).

    Attributes:
        range: of the whole part: what its records hold.
        tiers: who has it.
        read: what of it is to be read; the areas of a chunk's parts do not overlap. Only the layers limit what is read
            and delivered: where the heads are fewer than the part's, whoever is delivered to leaves the others out
            (or takes them: what two parts say about the same heads of a chunk is equally right). None: all of it.
    """

    range: PartRange
    tiers: tuple[int, ...]
    read: PartRange | None = None


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """A chunk that is a hit: its parts cover what was wanted.

    Attributes:
        key: the chunk's key.
        n_tokens: tokens in it.
        parts: the parts to read, none of their areas overlapping another.
    """

    key: bytes
    n_tokens: int
    parts: tuple[FoundPart, ...]


class Load(Protocol):
    """Chunks of one request on their way. Made by `KVStore.load`; its one owner ends it by `cancel` or `wait_all`."""

    @property
    def done(self) -> bool:
        """Everything has arrived, or it has failed; no delivery comes any more."""
        ...

    @property
    def failed(self) -> bool:
        """Some chunk cannot be had."""
        ...

    @property
    def good_chunks(self) -> int:
        """Chunks from the first that have arrived whole."""
        ...

    def ready(self, layer: int) -> bool:
        """True once all records of this model layer were delivered."""
        ...

    def wait(self, layer: int) -> None:
        """Return once `ready(layer)`.

        Raises:
            LoadFailed: it never will be.
        """
        ...

    def wait_all(self) -> None:
        """Return once every layer is ready.

        Raises:
            LoadFailed: one never will be.
        """
        ...

    def cancel(self) -> None:
        """Take units nobody reads yet back, and return when the last delivery is over. Idempotent."""
        ...

    def bytes_by_tier(self) -> tuple[int, ...]:
        """Bytes delivered so far, by tier number (the winners' only)."""
        ...
