"""What KV looks like in the store: the canonical form, the same for every kernel and device."""

from dataclasses import dataclass

from headrace.core.errors import ConfigError

#: Everything that is read with O_DIRECT starts and ends on such a boundary.
ALIGNMENT = 4096
HEADER_BYTES = 4096

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class KVLayout:
    """The KV of one model as stored.

    A layer's record is K then V, each `[heads, tokens, head_dim]` in C order, padded to `ALIGNMENT`.

    Attributes:
        fingerprint: hex digest of weights, configuration, dtype and format; KV is shared only under the same one.
        layers: layers of the model.
        kv_heads: kv heads of a layer.
        head_dim: elements of a key or a value.
        dtype: type of stored elements, a key of `ITEMSIZE`.
        chunk_tokens: tokens of a full chunk.

    Raises:
        ConfigError: a number is not positive, or the dtype is unknown.
    """

    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    chunk_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"KV of type '{self.dtype}' cannot be stored; use one of {', '.join(ITEMSIZE)}")

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    def payload_bytes(self, heads: int, tokens: int) -> int:
        """Bytes of K and V of one layer, without padding."""
        return 2 * heads * tokens * self.head_dim * self.itemsize

    def record_bytes(self, heads: int, tokens: int) -> int:
        """Bytes of one layer's record, padding included."""
        return aligned(self.payload_bytes(heads, tokens))

    def part_bytes(self, layers: int, heads: int, tokens: int) -> int:
        """Bytes of a whole part: header and records."""
        return HEADER_BYTES + layers * self.record_bytes(heads, tokens)
