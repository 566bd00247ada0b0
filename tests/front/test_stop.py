import time

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.front.stop import StopBuffer, StopSet

LETTERS = st.text(alphabet="abé", max_size=30)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=6), min_size=1, max_size=16)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: the earliest end of any stop string; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@given(st.lists(LETTERS, max_size=8), STOPS, st.booleans())
@settings(max_examples=500)
def test_text_ends_at_the_first_complete_stop_however_it_is_cut(
    parts: list[str], stops: list[str], include: bool
) -> None:
    buffer = StopBuffer(StopSet(stops), include)
    out = [buffer.push(part) for part in parts]
    found = first_match("".join(parts), stops)
    if found is None:
        assert buffer.matched is None
        assert "".join(out) + buffer.flush() == "".join(parts)
    else:
        end, stop = found
        assert buffer.matched == stop
        assert "".join(out) + buffer.flush() == "".join(parts)[: end if include else end - len(stop)]


@given(LETTERS, STOPS)
@settings(max_examples=300)
def test_exactly_what_could_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    buffer = StopBuffer(StopSet(stops), False)
    out = "".join(map(buffer.push, text))
    if buffer.matched is None:
        held = max(
            (n for n in range(len(text) + 1) for stop in stops if n < len(stop) and text.endswith(stop[:n])), default=0
        )
        assert out == text[: len(text) - held]


def test_no_part_of_a_stop_string_over_two_tokens_leaks() -> None:
    buffer = StopBuffer(StopSet(["</tool>", "END"]), False)
    assert [buffer.push(part) for part in ("x</to", "ast> y</", "tool", "> more")] == ["x", "</toast> y", "", ""]
    assert buffer.matched == "</tool>"


def test_cost_per_character_does_not_depend_on_the_stops() -> None:
    long = StopBuffer(StopSet(["a" * 4000 + "b", *(f"{'a' * n}c" for n in range(1, 16))]), False)
    started = time.perf_counter()
    out = sum(len(long.push("aaaa")) for _ in range(25_000))
    assert out == 100_000 - 4000
    assert time.perf_counter() - started < 3  # about 0.05 s; comparing suffixes anew at each token takes minutes
