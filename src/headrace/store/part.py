"""Names of what is stored: parts of chunks."""

import re
from typing import NamedTuple

KEY_BYTES = 32


class PartRange(NamedTuple):
    """A layer range x a kv-head range of a chunk; ends are exclusive."""

    first_layer: int
    last_layer: int
    first_head: int
    last_head: int

    @property
    def layers(self) -> range:
        """Model layers of the part."""
        return range(self.first_layer, self.last_layer)

    @property
    def heads(self) -> range:
        """KV heads of the part."""
        return range(self.first_head, self.last_head)

    @property
    def valid(self) -> bool:
        """True when neither range is empty or negative."""
        return 0 <= self.first_layer < self.last_layer and 0 <= self.first_head < self.last_head

    def covers(self, other: "PartRange") -> bool:
        """True when everything in `other` lies in this range."""
        return (
            self.first_layer <= other.first_layer
            and other.last_layer <= self.last_layer
            and self.first_head <= other.first_head
            and other.last_head <= self.last_head
        )


_NAME = re.compile(r"([0-9a-f]{64})-(\d{1,5})-(\d{1,5})-(\d{1,5})-(\d{1,5})\.kv")


class PartId(NamedTuple):
    """A part of a chunk: the chunk's key and which layers and heads.

    Attributes:
        key: `KEY_BYTES` bytes, see `keys`.
        range: layers and heads.
    """

    key: bytes
    range: PartRange

    @property
    def name(self) -> str:
        """A file name: hex key, layer range, head range."""
        return f"{self.key.hex()}-{'-'.join(map(str, self.range))}.kv"

    @classmethod
    def parse(cls, name: str) -> "PartId | None":
        """The part that a file name says; None when it is no part's name."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        part = cls(bytes.fromhex(found[1]), PartRange(*(int(found[i]) for i in range(2, 6))))
        return part if part.range.valid and part.name == name else None
