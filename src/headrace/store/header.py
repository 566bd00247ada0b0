"""The first 4 KiB of a part: what it is, and sums that prove it."""

import struct
from dataclasses import dataclass
from hashlib import blake2b

import xxhash

from headrace.store.keys import SALT_TAG_BYTES
from headrace.store.layout import HEADER_BYTES, ITEMSIZE, KVLayout, aligned
from headrace.store.part import PartId, PartRange
from headrace.store.tiers.tier import TierError

MAGIC = b"HDRACEKV"
VERSION = 1

# magic, version, layers (number of sums) | key, fingerprint | ranges of layers and heads | tokens, tokens of a full
# chunk, head_dim, bytes of an element | dtype | created | salt tag
_FIELDS = struct.Struct("<8sII32s32s4I4I16sd8s")
_SUMS_AT = 256
_SUM_AT = HEADER_BYTES - 8
_VERSION_AT = len(MAGIC)
#: What fits between the fields and the header's own sum.
MAX_LAYERS = (_SUM_AT - _SUMS_AT) // 8
_DTYPES = {name.encode().ljust(16, b"\0"): name for name in ITEMSIZE}


class BadHeader(TierError):
    """What lies there is not the part it should be: a miss, and the part should be dropped."""


def record_sum(record: memoryview) -> int:
    """xxh3_64 of a record, padding included.

    xxhash releases the interpreter lock above 100,000 bytes. Measured with xxhash 4.1 and a switch interval of 30 s:
    while 3,000 sums of 393 KB were taken (6 us each), a thread in pure Python made 10,209 steps; with 64 KB none.
    """
    return xxhash.xxh3_64_intdigest(record)


def raw_fingerprint(fingerprint: str) -> bytes:
    """32 bytes of a fingerprint: its 64 hex digits as bytes; of any other text, a hash."""
    if len(fingerprint) == 64:
        try:
            return bytes.fromhex(fingerprint)
        except ValueError:
            pass  # not hex: hashed below, as every other text
    return blake2b(fingerprint.encode(), digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What a part says about itself.

    Attributes:
        part: key and range.
        fingerprint: 32 bytes, see `raw_fingerprint`.
        n_tokens: tokens in it.
        chunk_tokens: tokens of a full chunk where it was written.
        head_dim: elements of a key or a value.
        dtype: type of the elements, a key of `ITEMSIZE`.
        created: when it was written, seconds since the epoch.
        sums: `record_sum` of every layer's record, in order.
        salt_tag: `keys.salt_tag` of the salt it was saved under.
    """

    part: PartId
    fingerprint: bytes
    n_tokens: int
    chunk_tokens: int
    head_dim: int
    dtype: str
    created: float
    sums: tuple[int, ...]
    salt_tag: bytes = bytes(SALT_TAG_BYTES)

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        part: PartId,
        n_tokens: int,
        sums: tuple[int, ...],
        created: float,
        salt_tag: bytes = bytes(SALT_TAG_BYTES),
    ) -> "PartHeader":
        """The header of a part of this layout."""
        print_ = raw_fingerprint(layout.fingerprint)
        dim, dtype = layout.head_dim, layout.dtype
        return cls(part, print_, n_tokens, layout.chunk_tokens, dim, dtype, created, sums, salt_tag)

    @property
    def record_bytes(self) -> int:
        """Bytes of one layer's record, padding included."""
        return aligned(2 * len(self.part.range.heads) * self.n_tokens * self.head_dim * ITEMSIZE[self.dtype])

    @property
    def part_bytes(self) -> int:
        """Bytes of the whole part, header included."""
        return HEADER_BYTES + len(self.part.range.layers) * self.record_bytes

    def offset_of(self, layer: int) -> int:
        """Where the record of a model layer begins."""
        return HEADER_BYTES + (layer - self.part.range.first_layer) * self.record_bytes

    def sum_of(self, layer: int) -> int:
        """The sum of a model layer's record."""
        return self.sums[layer - self.part.range.first_layer]

    def encode(self) -> bytes:
        """The `HEADER_BYTES` bytes.

        Raises:
            ValueError: it has not one sum for each layer, or more than `MAX_LAYERS` of them.
        """
        if len(self.sums) != len(self.part.range.layers) or len(self.sums) > MAX_LAYERS:
            raise ValueError(f"{len(self.sums)} sums for {len(self.part.range.layers)} layers (at most {MAX_LAYERS})")
        page = bytearray(HEADER_BYTES)
        _FIELDS.pack_into(
            page,
            0,
            MAGIC,
            VERSION,
            len(self.sums),
            self.part.key,
            self.fingerprint,
            *self.part.range,
            self.n_tokens,
            self.chunk_tokens,
            self.head_dim,
            ITEMSIZE[self.dtype],
            self.dtype.encode(),
            self.created,
            self.salt_tag,
        )
        struct.pack_into(f"<{len(self.sums)}Q", page, _SUMS_AT, *self.sums)
        struct.pack_into("<Q", page, _SUM_AT, xxhash.xxh3_64_intdigest(memoryview(page)[:_SUM_AT]))
        return bytes(page)

    def check(self, part: PartId, layout: KVLayout) -> None:
        """Make sure that it is the part asked for.

        Raises:
            BadHeader: it is another part, of another model, or of another form.
        """
        expected = raw_fingerprint(layout.fingerprint)
        if self.part.key != part.key:
            raise BadHeader(f"part {part.name} holds chunk {self.part.key.hex()}")
        if self.fingerprint != expected:
            raise BadHeader(f"part {part.name} is of model {self.fingerprint.hex()}, wanted {expected.hex()}")
        for what, found, wanted in (
            ("range", tuple(self.part.range), tuple(part.range)),
            ("dtype", self.dtype, layout.dtype),
            ("head_dim", self.head_dim, layout.head_dim),
        ):
            if found != wanted:
                raise BadHeader(f"part {part.name} has {what} {found}, wanted {wanted}")
        if self.part.range.last_layer > layout.layers or self.part.range.last_head > layout.kv_heads:
            raise BadHeader(f"part {part.name} exceeds {layout.layers} layers and {layout.kv_heads} kv heads")
        if self.n_tokens > layout.chunk_tokens:
            raise BadHeader(f"part {part.name} has {self.n_tokens} tokens, more than {layout.chunk_tokens}")


def decode(page: memoryview | bytes) -> PartHeader:
    """Read a header.

    Raises:
        BadHeader: it is damaged, of another version, or no header at all; says which.
    """
    if len(page) != HEADER_BYTES:
        raise BadHeader(f"a header has {HEADER_BYTES} bytes, not {len(page)}")
    if page[:_VERSION_AT] != MAGIC:
        raise BadHeader("no header of a part (wrong magic)")
    (version,) = struct.unpack_from("<I", page, _VERSION_AT)
    if version != VERSION:
        raise BadHeader(f"header of format version {version}, this is version {VERSION}")
    (own,) = struct.unpack_from("<Q", page, _SUM_AT)
    if own != xxhash.xxh3_64_intdigest(page[:_SUM_AT]):
        raise BadHeader("header does not match its checksum")
    _, _, count, key, print_, *numbers, dtype, created, salt_tag = _FIELDS.unpack_from(page, 0)
    covers = PartRange(*numbers[:4])
    n_tokens, chunk_tokens, head_dim, itemsize = numbers[4:]
    # The sum is right, so what follows was written like this: by a faulty or hostile writer.
    if not covers.valid or count != len(covers.layers) or count > MAX_LAYERS:
        raise BadHeader(f"header with impossible range {tuple(covers)} and {count} sums")
    if dtype not in _DTYPES or itemsize != ITEMSIZE[_DTYPES[dtype]]:
        raise BadHeader(f"header with unknown dtype {dtype!r} of {itemsize} bytes")
    if not 1 <= n_tokens <= chunk_tokens or head_dim < 1:
        raise BadHeader(f"header with impossible sizes: {n_tokens} of {chunk_tokens} tokens, head_dim {head_dim}")
    sums = struct.unpack_from(f"<{count}Q", page, _SUMS_AT)
    part = PartId(key, covers)
    return PartHeader(part, print_, n_tokens, chunk_tokens, head_dim, _DTYPES[dtype], created, sums, salt_tag=salt_tag)


assert _FIELDS.size <= _SUMS_AT
