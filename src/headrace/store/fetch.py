"""Reading a unit from a tier, the proof that what came is what was asked for, and the claim that it is the first."""

import logging
from ctypes import addressof, c_int64, sizeof
from typing import TYPE_CHECKING, NamedTuple

from headrace.store.header import BadHeader, PartHeader, decode
from headrace.store.layout import HEADER_BYTES, KVLayout
from headrace.store.native.fields import CLAIMED
from headrace.store.native.library import Job, NativeCopy
from headrace.store.part import PartId
from headrace.store.read_unit import Outcome, ReadUnit
from headrace.store.tiers.tier import PartCutShort, PartMissing, SettlingTier, Tier, TierError

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
        begin: first layer to read.
        at_once: layers of a unit.
        header: a header that was verified, of whichever tier; None before.
        headers: headers of tiers whose part was found to be of another origin than `header` says.
        bad: bit t is set when tier t's part was reported as missing or wrong.
    """

    __slots__ = (
        "at_once", "bad", "begin", "chunk", "flags", "header", "headers", "load", "n_tokens", "part", "record_bytes",
    )  # fmt: skip

    def __init__(
        self,
        load: "ActiveLoad",
        chunk: int,
        part: PartId,
        n_tokens: int,
        record_bytes: int,
        layers: tuple[int, int],
        at_once: int,
    ) -> None:
        self.load = load
        self.chunk = chunk
        self.part = part
        self.n_tokens = n_tokens
        self.record_bytes = record_bytes
        self.begin, end = layers
        self.at_once = at_once
        self.flags = (c_int64 * -(-(end - self.begin) // at_once))()
        self.header: PartHeader | None = None
        self.headers: dict[int, PartHeader] = {}
        self.bad = 0

    def flag(self, layer: int) -> int:
        """Address of the flag by which the unit that begins with a layer is claimed, see `native.library.claim`.

        Whoever claims a unit decides about it: an attempt that has read it, or its load, for nobody wants it any more.
        """
        return addressof(self.flags) + sizeof(c_int64) * ((layer - self.begin) // self.at_once)


#: What a unit is to the reader: a part, its first layer to read, the layer after the last.
Layers = tuple[PartSource, int, int]


class Fetched(NamedTuple):
    """How a read went.

    Attributes:
        outcome: for the pool; `OK`: the unit is claimed, and copied if there was a copy to do.
        missing: the part was not there.
        header_bytes: bytes of headers read beside the records.
    """

    outcome: Outcome
    missing: bool
    header_bytes: int


def fetch(
    tier: Tier,
    settling: SettlingTier | None,
    number: int,
    layout: KVLayout,
    unit: ReadUnit[Layers],
    memory: memoryview,
    copy: NativeCopy | None = None,
) -> Fetched:
    """Read a unit's records behind the first `HEADER_BYTES` of the memory, prove each with the header, claim and copy.

    The header is read once per load, with the part's first records where these are wanted. It may have come from
    another tier: the sums say whether these are the same bytes, and where they are not, the part's own header decides.

    Args:
        tier: where to read.
        settling: the tier, if it is one that settles.
        number: of the tier.
        layout: what the part must be of.
        unit: what to read.
        memory: aligned; room for a header and the unit.
        copy: what to do with the records once they are proven, unless another attempt was first.
    """
    source, first, last = unit.what
    base = source.part.range.first_layer
    size = source.record_bytes
    records = memory[HEADER_BYTES : HEADER_BYTES + (last - first) * size]
    page = memory[:HEADER_BYTES]
    offset = HEADER_BYTES + (first - base) * size
    header = source.headers.get(number) or source.header
    header_bytes = 0
    job = Job(records, source.flag(first), copy)
    try:
        if header is not None:
            job.expect(header.sums[first - base : last - base])
            if settling is not None:
                answer = settling.read_and_settle(source.part, offset, records, job)
            else:
                tier.read(source.part, offset, records)
                answer = job.settle()
        else:
            header_bytes = HEADER_BYTES
            if first == base:
                tier.read(source.part, 0, memory[: HEADER_BYTES + len(records)])
                header = _proven(source, number, layout, page)
            else:
                tier.read(source.part, 0, page)
                header = _proven(source, number, layout, page)
                tier.read(source.part, offset, records)
            job.expect(header.sums[first - base : last - base])
            answer = job.settle()
        while answer >= 0:
            layer = first + answer
            header_bytes += HEADER_BYTES
            tier.read(source.part, 0, page)
            own = _proven(source, number, layout, page)
            if own.sums[layer - base] == header.sums[layer - base]:
                return Fetched(Outcome.WRONG, False, header_bytes)
            header = own  # of another origin than the header known so far, or written anew since
            job.expect(header.sums[first - base : last - base])
            answer = job.settle()
        return Fetched(Outcome.OK if answer == CLAIMED else Outcome.LATE, False, header_bytes)
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
