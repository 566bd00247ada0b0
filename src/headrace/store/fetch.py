"""Reading a unit from a tier, and the proof that what came is what was asked for."""

import logging
from typing import TYPE_CHECKING, NamedTuple

from headrace.store.header import BadHeader, PartHeader, decode, record_sum
from headrace.store.layout import HEADER_BYTES, KVLayout
from headrace.store.part import PartId
from headrace.store.read_unit import Outcome, ReadUnit, State
from headrace.store.tiers.tier import PartCutShort, PartMissing, Tier, TierError

if TYPE_CHECKING:
    from headrace.store.active_load import ActiveLoad

log = logging.getLogger(__name__)


class PartSource:
    """A part of a chunk being loaded, the same for all of its units.

    Attributes:
        load: whom it is for.
        chunk: number of the chunk in the load.
        part: which part.
        n_tokens: tokens it must have.
        record_bytes: bytes of a layer's record.
        payload_bytes: bytes of it without padding.
        header: a header that was verified, of whichever tier; None before.
        headers: headers of tiers whose part was found to be of another origin than `header` says.
        bad: bit t is set when tier t's part was reported as missing or wrong.
    """

    __slots__ = ("bad", "chunk", "header", "headers", "load", "n_tokens", "part", "payload_bytes", "record_bytes")

    def __init__(
        self, load: "ActiveLoad", chunk: int, part: PartId, n_tokens: int, payload_bytes: int, record_bytes: int
    ) -> None:
        self.load = load
        self.chunk = chunk
        self.part = part
        self.n_tokens = n_tokens
        self.payload_bytes = payload_bytes
        self.record_bytes = record_bytes
        self.header: PartHeader | None = None
        self.headers: dict[int, PartHeader] = {}
        self.bad = 0


#: What a unit is to the reader: a part, its first layer to read, the layer after the last.
Layers = tuple[PartSource, int, int]


class Fetched(NamedTuple):
    """How a read went.

    Attributes:
        outcome: for the pool.
        missing: the part was not there.
        header_bytes: bytes of headers read beside the records.
    """

    outcome: Outcome
    missing: bool
    header_bytes: int


def fetch(tier: Tier, number: int, layout: KVLayout, unit: ReadUnit[Layers], memory: memoryview) -> Fetched:
    """Read a unit's records behind the first `HEADER_BYTES` of the memory, and prove each with the part's header.

    The header is read once per load, with the part's first records where these are wanted. It may have come from
    another tier: the sums say whether these are the same bytes, and where they are not, the part's own header decides.

    Args:
        tier: where to read.
        number: of the tier.
        layout: what the part must be of.
        unit: what to read.
        memory: aligned; room for a header and the unit.
    """
    source, first, last = unit.what
    base = source.part.range.first_layer
    size = source.record_bytes
    records = memory[HEADER_BYTES : HEADER_BYTES + (last - first) * size]
    page = memory[:HEADER_BYTES]
    header = source.headers.get(number) or source.header
    header_bytes = 0
    try:
        if header is None:
            header_bytes = HEADER_BYTES
            if first == base:
                tier.read(source.part, 0, memory[: HEADER_BYTES + len(records)])
            else:
                tier.read(source.part, 0, page)
            header = _proven(source, number, layout, page)
        if not (header_bytes and first == base):
            tier.read(source.part, HEADER_BYTES + (first - base) * size, records)
        layer = first
        while layer < last:
            if unit.state is not State.READING:
                break  # another tier was first: nobody will look at these bytes
            if record_sum(records[(layer - first) * size : (layer - first + 1) * size]) == header.sums[layer - base]:
                layer += 1
                continue
            header_bytes += HEADER_BYTES
            tier.read(source.part, 0, page)
            own = _proven(source, number, layout, page)
            if own.sums[layer - base] == header.sums[layer - base]:
                return Fetched(Outcome.WRONG, False, header_bytes)
            header = own  # of another origin than the header known so far, or written anew since
        return Fetched(Outcome.OK, False, header_bytes)
    except PartMissing:
        return Fetched(Outcome.WRONG, True, header_bytes)
    except (BadHeader, PartCutShort) as error:
        log.info("%s: %s", tier.name, error)
        return Fetched(Outcome.WRONG, False, header_bytes)
    except TierError as error:
        log.info("%s: %s", tier.name, error)
    except Exception:
        log.exception("%s: reading %s failed in an unforeseen way", tier.name, source.part.name)
    return Fetched(Outcome.ERROR, False, header_bytes)


def _proven(source: PartSource, number: int, layout: KVLayout, page: memoryview) -> PartHeader:
    """The header of a part, which must be the part asked for."""
    header = decode(page)
    header.check(source.part, layout)
    if header.n_tokens != source.n_tokens:
        raise BadHeader(f"part {source.part.name} has {header.n_tokens} tokens, wanted {source.n_tokens}")
    if source.header is None:
        source.header = header
    source.headers[number] = header
    return header
