import hypothesis.strategies as st
from hypothesis import given

from headrace.store.coverage import cover, found_chunk
from headrace.store.part import PartRange

FULL = PartRange(0, 6, 0, 4)


@st.composite
def ranges(draw: st.DrawFn) -> PartRange:
    first_layer, first_head = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    return PartRange(
        first_layer, draw(st.integers(first_layer + 1, 6)), first_head, draw(st.integers(first_head + 1, 4))
    )


def cells(area: PartRange) -> set[tuple[int, int]]:
    return {(layer, head) for layer in area.layers for head in area.heads}


@given(st.lists(st.lists(ranges(), max_size=6).map(tuple), min_size=1, max_size=3).map(tuple), ranges())
def test_a_cover_is_found_exactly_when_the_cells_are_held(
    held: tuple[tuple[PartRange, ...], ...], wanted: PartRange
) -> None:
    union = set().union(*(cells(part) for parts in held for part in parts))
    found = cover(held, wanted)
    assert (found is not None) == (cells(wanted) <= union)
    covered: list[tuple[int, int]] = []
    for part in found or ():
        assert part.read is not None
        assert part.range.covers(part.read)
        assert part.tiers == tuple(tier for tier, parts in enumerate(held) if part.range in parts) != ()
        covered += cells(part.read)
    if found is not None:
        assert sorted(covered) == sorted(cells(wanted)), "every cell exactly once"


def test_one_full_part_on_all_tiers_is_taken_before_pieces() -> None:
    half = PartRange(0, 3, 0, 4)
    chunk = found_chunk(b"k" * 32, 256, [[half, FULL], [FULL]], FULL)
    assert chunk is not None
    assert [(part.range, part.tiers, part.read) for part in chunk.parts] == [(FULL, (0, 1), FULL)]
    assert (chunk.key, chunk.n_tokens) == (b"k" * 32, 256)


def test_pieces_on_more_tiers_are_taken_before_one_part_on_fewer() -> None:
    low, high = PartRange(0, 6, 0, 2), PartRange(0, 6, 2, 4)
    short = PartRange(0, 5, 0, 4)
    found = cover(((low, high, short), (low, high)), FULL)
    assert found is not None
    assert [(part.range, part.tiers) for part in found] == [(low, (0, 1)), (high, (0, 1))]


def test_layers_that_lie_together_are_read_together() -> None:
    front, back = PartRange(0, 4, 0, 4), PartRange(2, 6, 0, 4)
    found = cover(((front,), (back,)), FULL)
    assert found is not None
    assert len(found) == 2, "the overlap is read from one of them, in one piece"


def test_a_part_of_the_heads_is_read_whole_but_used_in_part() -> None:
    found = cover(((FULL,),), PartRange(1, 3, 2, 3))
    assert found is not None
    assert [(part.range, part.read) for part in found] == [(FULL, PartRange(1, 3, 2, 3))]


def test_nothing_held_is_a_miss() -> None:
    assert found_chunk(b"k" * 32, 1, [[], []], FULL) is None
