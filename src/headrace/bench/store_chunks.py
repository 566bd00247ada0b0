"""Chunks to read in measurements of the store, on all tiers alike, and the tiers to put them on."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.settings import format_size
from headrace.store.buffers import BufferPool, size_class
from headrace.store.header import PartHeader, record_sum
from headrace.store.layout import HEADER_BYTES, KVLayout
from headrace.store.load import FoundChunk, FoundPart
from headrace.store.part import KEY_BYTES, PartId, PartRange
from headrace.store.tiers.memory import MemoryTier
from headrace.store.tiers.spec import build_tiers, parse_spec, show_spec
from headrace.store.tiers.throttled import ThrottledTier
from headrace.store.tiers.tier import Tier, put_all


def whole(layout: KVLayout) -> PartRange:
    """All layers and heads of a model."""
    return PartRange(0, layout.layers, 0, layout.kv_heads)


def chunk_bytes(layout: KVLayout) -> int:
    """Bytes of a chunk in one part, header included."""
    return layout.part_bytes(layout.layers, layout.kv_heads, layout.chunk_tokens)


@contextmanager
def scratch_tiers(specs: Sequence[str]) -> Iterator[list[Tier]]:
    """Tiers as `--tier` texts say, but empty: in folders inside those given, in memory apart. All goes at the end.

    Raises:
        ConfigError: a text is wrong, or a tier cannot be made.
    """
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        own = []
        for text in specs:
            spec = parse_spec(text)
            if spec.path is not None:
                try:
                    spec.path.mkdir(parents=True, exist_ok=True)
                    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=spec.path))
                except OSError as error:
                    raise ConfigError(f"cannot write to folder {spec.path}: {error.strerror}; give another") from error
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                spec = replace(spec, path=folder)
            own.append(show_spec(spec))
        tiers = build_tiers(own, home)
        for tier in tiers:
            if isinstance(source := unthrottled(tier), MemoryTier):
                stack.callback(source.remove_all)
            stack.callback(tier.close)
        yield tiers


def unthrottled(tier: Tier) -> Tier:
    """The tier behind a throttled one, or the tier itself."""
    return tier.inner if isinstance(tier, ThrottledTier) else tier


def write_chunks(tiers: Sequence[Tier], layout: KVLayout, count: int) -> list[FoundChunk]:
    """Put chunks of random content on every tier, at full speed.

    Raises:
        ConfigError: a tier is too small for them.
    """
    nbytes = chunk_bytes(layout)
    for tier in tiers:
        if tier.capacity < count * nbytes:
            raise ConfigError(
                f"tier {tier.name}: {count} chunks take {format_size(count * nbytes)}, it holds "
                f"{format_size(tier.capacity)}; make it larger or give fewer --chunks"
            )
    area = whole(layout)
    size = layout.record_bytes(layout.kv_heads, layout.chunk_tokens)
    rng = np.random.default_rng(0)
    chunks = []
    with BufferPool(size_class(nbytes)).acquire(nbytes) as buffer:
        memory = np.frombuffer(buffer.view, np.uint8)
        memory[HEADER_BYTES:] = rng.integers(0, 256, nbytes - HEADER_BYTES, np.uint8)
        for number in range(count):
            part = PartId(number.to_bytes(KEY_BYTES, "big"), area)
            records = [buffer.view[at : at + size] for at in range(HEADER_BYTES, nbytes, size)]
            for record in records:
                record[:8] = number.to_bytes(8, "big")
            sums = tuple(record_sum(record) for record in records)
            buffer.view[:HEADER_BYTES] = PartHeader.of(layout, part, layout.chunk_tokens, sums, 0.0).encode()
            for tier in tiers:
                with unthrottled(tier).create(part, nbytes) as writer:
                    put_all(writer, [buffer.view])
            chunks.append(FoundChunk(part.key, layout.chunk_tokens, (FoundPart(area, tuple(range(len(tiers)))),)))
            del records, record
        del memory
    return chunks
