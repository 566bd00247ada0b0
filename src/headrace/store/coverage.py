"""Which parts of a chunk to read, and from which tiers they can be had: pure."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from headrace.store.load import FoundChunk, FoundPart
from headrace.store.part import PartRange


def found_chunk(key: bytes, n_tokens: int, held: Sequence[Sequence[PartRange]], wanted: PartRange) -> FoundChunk | None:
    """A chunk as a hit; None when what is held of it does not cover `wanted`.

    Args:
        key: the chunk's key.
        n_tokens: tokens in it.
        held: parts of this chunk by tier number.
        wanted: layers and heads to load.
    """
    parts = cover(tuple(tuple(ranges) for ranges in held), wanted)
    return None if parts is None else FoundChunk(key, n_tokens, parts)


@lru_cache(maxsize=1024)  # the chunks of a prefix mostly lie the same way
def cover(held: tuple[tuple[PartRange, ...], ...], wanted: PartRange) -> tuple[FoundPart, ...] | None:
    """Parts whose areas to read (`FoundPart.read`) cover `wanted` exactly once; None when there are none.

    One part on as many tiers as possible is preferred. Otherwise the layers are cut where parts begin or end, and in
    each piece the heads are covered with few parts, from those that lie on most tiers. An area may take only some
    layers of its part, which lie together in the file; when it takes only some heads, the records are still read whole
    and whoever is delivered to leaves the other heads out.
    """
    tiers: dict[PartRange, tuple[int, ...]] = {}
    for tier, ranges in enumerate(held):
        for part in dict.fromkeys(ranges):
            tiers[part] = (*tiers.get(part, ()), tier)
    whole = [part for part in tiers if part.covers(wanted)]
    if whole:
        # The smallest of those on most tiers: fewer bytes of heads that nobody wants.
        best = min(whole, key=lambda part: (-len(tiers[part]), len(part.heads), part))
        return (FoundPart(best, tiers[best], wanted),)
    edges = {wanted.first_layer, wanted.last_layer}
    edges |= {edge for part in tiers for edge in part[:2] if wanted.first_layer < edge < wanted.last_layer}
    cuts = sorted(edges)
    pieces: list[tuple[int, int, list[tuple[PartRange, int, int]]]] = []
    for first, last in pairwise(cuts):
        spanning = [part for part in tiers if part.first_layer <= first and last <= part.last_layer]
        chosen = _cover_heads(spanning, tiers, wanted.first_head, wanted.last_head)
        if chosen is None:
            return None
        if pieces and pieces[-1][2] == chosen:
            pieces[-1] = (pieces[-1][0], last, chosen)
        else:
            pieces.append((first, last, chosen))
    return tuple(
        FoundPart(part, tiers[part], PartRange(first, last, low, high))
        for first, last, chosen in pieces
        for part, low, high in chosen
    )


def _cover_heads(
    parts: Sequence[PartRange], tiers: dict[PartRange, tuple[int, ...]], first: int, last: int
) -> list[tuple[PartRange, int, int]] | None:
    """Cover heads `first` to `last` with areas of parts, from the highest number of tiers that suffices."""
    for least in sorted({len(tiers[part]) for part in parts}, reverse=True):
        chosen = []
        head = first
        while head < last:
            reaching = [part for part in parts if part.first_head <= head < part.last_head]
            usable = [part for part in reaching if len(tiers[part]) >= least]
            if not usable:
                break
            best = max(usable, key=lambda part: (part.last_head, -part.first_head, len(tiers[part]), part))
            chosen.append((best, head, min(best.last_head, last)))
            head = min(best.last_head, last)
        else:
            return chosen
    return None
