import dataclasses
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.store.header import MAX_LAYERS, BadHeader, PartHeader, decode, raw_fingerprint, record_sum
from headrace.store.layout import HEADER_BYTES, KVLayout
from headrace.store.part import PartId, PartRange

LAYOUT = KVLayout("ab" * 32, layers=30, kv_heads=3, head_dim=64, dtype="float32")
PART = PartId(bytes(range(32)), PartRange(2, 30, 0, 3))
HEADER = PartHeader.of(LAYOUT, PART, 128, tuple(range(28)), 1.5, b"saltsalt")


@st.composite
def headers(draw: st.DrawFn) -> PartHeader:
    first, layers = draw(st.integers(0, 500)), draw(st.integers(1, MAX_LAYERS))
    first_head, heads = draw(st.integers(0, 40)), draw(st.integers(1, 40))
    chunk = draw(st.integers(1, 4096))
    seed = draw(st.integers(0, 2**64 - 1))
    return PartHeader(
        PartId(
            draw(st.binary(min_size=32, max_size=32)), PartRange(first, first + layers, first_head, first_head + heads)
        ),
        draw(st.binary(min_size=32, max_size=32)),
        draw(st.integers(1, chunk)),
        chunk,
        draw(st.integers(1, 512)),
        draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        draw(st.floats(0, 1e11)),
        tuple((seed * (layer + 1)) % 2**64 for layer in range(layers)),
        draw(st.binary(min_size=8, max_size=8)),
    )


@given(headers())
def test_what_is_written_is_read(header: PartHeader) -> None:
    page = header.encode()
    assert len(page) == HEADER_BYTES
    assert decode(page) == header
    assert decode(memoryview(bytearray(page))) == header


def test_440_layers_fit() -> None:
    assert MAX_LAYERS >= 440
    part = PartId(bytes(32), PartRange(0, MAX_LAYERS + 1, 0, 1))
    with pytest.raises(ValueError, match="sums"):
        PartHeader.of(LAYOUT, part, 256, (0,) * (MAX_LAYERS + 1), 0.0).encode()
    with pytest.raises(ValueError, match="sums"):
        dataclasses.replace(HEADER, sums=HEADER.sums[:-1]).encode()


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    page = bytearray(HEADER.encode())
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadHeader):
        decode(page)


def resealed(offset: int, value: bytes) -> bytes:
    page = bytearray(HEADER.encode())
    page[offset : offset + len(value)] = value
    page[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:-8])))
    return bytes(page)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (b"", "0"),
        (HEADER.encode()[:-1], "4095"),
        (bytes(HEADER_BYTES), "magic"),
        (resealed(0, b"x"), "magic"),
        (resealed(8, struct.pack("<I", 0)), "version 0"),
        (resealed(8, struct.pack("<I", 2)), "version 2"),
        (HEADER.encode()[:300] + b"\x99" + HEADER.encode()[301:], "checksum"),
        (resealed(12, struct.pack("<I", 27)), "range"),
        (resealed(12, struct.pack("<I", 2**31)), "range"),
        (resealed(80, struct.pack("<II", 5, 5)), "range"),
        (resealed(88, struct.pack("<II", 4, 3)), "range"),
        (resealed(96, struct.pack("<I", 0)), "sizes"),
        (resealed(96, struct.pack("<I", 257)), "sizes"),
        (resealed(104, struct.pack("<I", 0)), "sizes"),
        (resealed(108, struct.pack("<I", 2)), "dtype"),
        (resealed(112, b"float99"), "dtype"),
    ],
)
def test_the_reason_is_told(page: bytes, why: str) -> None:
    with pytest.raises(BadHeader, match=why):
        decode(page)


def test_it_must_be_the_part_asked_for() -> None:
    HEADER.check(PART, LAYOUT)
    short = dataclasses.replace(HEADER, n_tokens=17)
    short.check(PART, LAYOUT)
    other = PartId(bytes(32), PART.range)
    for part, layout, why in (
        (other, LAYOUT, "chunk"),
        (PartId(PART.key, PartRange(0, 28, 0, 3)), LAYOUT, "range"),
        (PART, dataclasses.replace(LAYOUT, fingerprint="ac" * 32), "model"),
        (PART, dataclasses.replace(LAYOUT, dtype="bfloat16"), "dtype"),
        (PART, dataclasses.replace(LAYOUT, head_dim=32), "head_dim"),
        (PART, dataclasses.replace(LAYOUT, layers=29), "exceeds"),
        (PART, dataclasses.replace(LAYOUT, kv_heads=2), "exceeds"),
        (PART, dataclasses.replace(LAYOUT, chunk_tokens=64), "tokens"),
    ):
        with pytest.raises(BadHeader, match=why):
            HEADER.check(part, layout)


def test_sizes_agree_with_the_layout() -> None:
    for tokens in (1, 17, 128):
        header = dataclasses.replace(HEADER, n_tokens=tokens)
        assert header.record_bytes == LAYOUT.record_bytes(3, tokens)
        assert header.part_bytes == LAYOUT.part_bytes(28, 3, tokens)
        assert header.offset_of(2) == HEADER_BYTES
        assert header.offset_of(29) + header.record_bytes == header.part_bytes
    assert HEADER.sum_of(2) == 0
    assert HEADER.sum_of(29) == 27


def test_fingerprints_of_any_form() -> None:
    assert raw_fingerprint("ab" * 32) == bytes.fromhex("ab" * 32)
    assert len({raw_fingerprint(text) for text in ("", "x", "xy", "z" * 64, "ab" * 32)}) == 5


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_of_a_record_is_noticed(record: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    flipped = bytearray(record)
    flipped[bit // 8] ^= 1 << bit % 8
    assert record_sum(memoryview(flipped)) != record_sum(memoryview(record))
