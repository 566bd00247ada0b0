"""Cutting a load into units: what is read at once."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from headrace.store.active_load import ActiveLoad
from headrace.store.fetch import PartSource
from headrace.store.layout import KVLayout
from headrace.store.load import FoundChunk
from headrace.store.part import PartId, PartRange
from headrace.store.read_unit import ReadUnit

#: Bytes of a unit. At least so many: two layers of the default model's chunks, early enough for a forward pass that
#: follows a load, see `docs/decisions/0013`; at most so many: more gains nothing, see `0016`.
LEAST_BYTES, MOST_BYTES = 512 << 10, 2 << 20

#: Units of a step, unless that takes units out of these bounds: what is larger than a few hundred MB takes so long that
#: reading it with little effort counts more than having its first layer soon.
STEP_UNITS = 1024


def bytes_at_once(layout: KVLayout, records: int) -> int:
    """Bytes of a unit in a step.

    Args:
        layout: of the KV.
        records: how many the step reads.
    """
    nbytes = records * layout.record_bytes(layout.kv_heads, layout.chunk_tokens)
    return min(max(LEAST_BYTES, nbytes // STEP_UNITS), MOST_BYTES)


def plan_units(
    load: ActiveLoad, chunks: Sequence[FoundChunk], wanted: PartRange, layout: KVLayout, unit_bytes: int
) -> Mapping[int, int]:
    """Give a load its units: adjacent layers of a part, about `unit_bytes`, at least one layer.

    Runs in the thread of whoever orders, between two of its steps: about half a microsecond a unit.

    Args:
        load: gets the units, and is told what to expect.
        chunks: what to load.
        wanted: layers and heads of it.
        layout: of the KV.
        unit_bytes: bytes to read at once.

    Returns:
        Number of units by who holds them (bit t: tier t).
    """
    counts: defaultdict[int, int] = defaultdict(int)
    layers: defaultdict[tuple[int, int], int] = defaultdict(int)
    chunk_layers = [0] * len(chunks)
    cuts: dict[tuple[int, int, int], tuple[int, list[tuple[int, int, int]]]] = {}
    number = load.number
    sizes: dict[tuple[int, int], int] = {}
    for index, chunk in enumerate(chunks):
        for found in chunk.parts:
            area = found.read or found.range
            first, last = max(area.first_layer, wanted.first_layer), min(area.last_layer, wanted.last_layer)
            if first >= last:
                continue
            shape = (found.range.last_head - found.range.first_head, chunk.n_tokens)
            if shape not in sizes:
                sizes[shape] = layout.record_bytes(*shape)
            record = sizes[shape]
            area_of = (first, last, record)
            if area_of not in cuts:
                cuts[area_of] = _cut(first, last, record, unit_bytes)
            at_once, pieces = cuts[area_of]
            part = PartId(chunk.key, found.range)
            source = PartSource(load, index, part, chunk.n_tokens, record, (first, last), at_once)
            holders = 0
            for tier in found.tiers:
                holders |= 1 << tier
            layers[first, last] += 1
            chunk_layers[index] += last - first
            load.units += [
                ReadUnit(number, holders, begin, nbytes, (source, begin, end)) for begin, end, nbytes in pieces
            ]
            counts[holders] += len(pieces)
    load.expect(layers, chunk_layers)
    return counts


def _cut(first: int, last: int, record: int, unit_bytes: int) -> tuple[int, list[tuple[int, int, int]]]:
    """How many layers are read at once, and of each unit the first layer, the layer after the last, and the bytes."""
    at_most = max(1, unit_bytes // record)
    at_once = -(-(last - first) // -(-(last - first) // at_most))  # no short one at the end
    ends = [(begin, min(begin + at_once, last)) for begin in range(first, last, at_once)]
    return at_once, [(begin, end, (end - begin) * record) for begin, end in ends]
