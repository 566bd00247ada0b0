"""What a writer is asked for: the contract between the store and whoever saves KV."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.store.part import PartId

#: Called in a writing thread: copy K and V of a model layer into the record (canonical form, padding left out).
#: It must be quick to give up the interpreter lock.
Pack = Callable[[int, memoryview], None]


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """A part to save.

    Attributes:
        part: which.
        n_tokens: tokens in it.
        chunk: number of the chunk in its prefix, from 0: what a policy by prefix position goes by.
        weight: seconds it takes to compute it again.
        salt_tag: `keys.salt_tag` of the request's salt; lies in the header so that all of a salt can be purged.
        parent: key of the chunk before it in its prefix, where known: behind one that was not saved it is of no use.
    """

    part: PartId
    n_tokens: int
    chunk: int
    weight: float
    salt_tag: bytes = bytes(8)
    parent: bytes | None = None


class Save(Protocol):
    """A part on its way to the tiers. `packed` turns true exactly once, also when it was dropped or has failed."""

    @property
    def packed(self) -> bool:
        """True once `pack` will not be called any more: the source may be overwritten."""
        ...

    def layer_ready(self, layer: int) -> None:
        """The source of this model layer is complete; it may be packed from now on."""
        ...

    def cancel(self) -> None:
        """Give up: nothing is published, and `packed` turns true once a call of `pack` under way is over."""
        ...
