"""Parsers of tool calls and reasoning: any chunking gives the same result."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from headrace.api.reasoning import ThinkSplitter
from headrace.api.tool_parser import HermesParser

FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool_", "</tool", "<", "{", "}", '{"name": "f"', '"name"', '"arguments"', ":",
        ",", '"', "\\", '\\"', "[", "]", "1", "null", " ", "\n", "hello", "é", '{"a": "}{\\"x"}', "<think>", "</think>",
        '{"name": "f", "arguments": {"a": [1, {"b": "</tool_call>"}]}}', '"\\ud800"', '{"arguments": {}, "name": "g"}',
    ]
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(), st.text() | st.integers())
START = CallStart(0, "0", "f")
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind merged, so that only the content counts and not how it was cut."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            out[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            out.append(piece)
    return out


def parse(text: str, cuts: list[int], parallel: bool = True) -> list[Piece]:
    counter = itertools.count()
    parser = HermesParser(parallel, new_id=lambda: f"call_{next(counter)}")
    return run(parser, text, cuts)


def run(parser: HermesParser | ThinkSplitter, text: str, cuts: list[int]) -> list[Piece]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces: list[Piece] = []
    for begin, end in itertools.pairwise(edges):
        pieces += parser.feed(text[begin:end])
    return joined(pieces + parser.finish())


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=20))
def test_tool_calls_do_not_depend_on_chunks(text: str, cuts: list[int]) -> None:
    whole = parse(text, [])
    assert parse(text, cuts) == whole
    assert parse(text, list(range(len(text)))) == whole


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=20), st.booleans())
def test_reasoning_does_not_depend_on_chunks(text: str, cuts: list[int], opened: bool) -> None:
    whole = run(ThinkSplitter(opened), text, [])
    assert run(ThinkSplitter(opened), text, cuts) == whole
    assert run(ThinkSplitter(opened), text, list(range(len(text)))) == whole


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=20), ARGUMENTS), min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_well_formed_calls_are_found(
    calls: list[tuple[str, dict[str, object]]], ascii_only: bool, cuts: list[int]
) -> None:
    text = "Let me see.\n" + "\n".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=ascii_only)}\n</tool_call>"
        for n, a in calls
    )
    pieces = parse(text, cuts)
    assert pieces[0] == Content("Let me see.")
    starts = [p for p in pieces if isinstance(p, CallStart)]
    arguments = [json.loads(p.text) for p in pieces if isinstance(p, CallArguments)]
    assert [p.name for p in starts] == [n for n, _ in calls]
    assert arguments == [a for _, a in calls]
    assert [p.index for p in starts] == list(range(len(calls)))
    assert len(pieces) == 1 + 2 * len(calls)


def test_name_comes_before_the_arguments_are_complete() -> None:
    parser = HermesParser(new_id=lambda: "id")
    assert parser.feed('<tool_call>{"name": "get", "argu') == [CallStart(0, "id", "get")]
    assert parser.feed('ments": {"city": "Par') == [CallArguments(0, '{"city": "Par')]
    assert parser.feed('is"}') == [CallArguments(0, 'is"}')]
    assert parser.feed("}</tool_call>") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text ", [Content("plain text ")]),
        ("a <tool_call>no json</tool_call>", [Content("a"), Content("<tool_call>no json</tool_call>")]),
        ('<tool_call>{"arguments": {}}</tool_call>', [Content('<tool_call>{"arguments": {}}</tool_call>')]),
        ('<tool_call>{"name": "f"', [START]),
        ('<tool_call>{"name": "f"}', [START, CallArguments(0, "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}', [START, CallArguments(0, "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}',
            [START, CallArguments(0, '{"a": 1}')],
        ),
        ('<tool_call>{"name": 3}', [Content('<tool_call>{"name": 3}')]),
        ('<tool_call>{"name": "f"}}</tool_call> bye', [START, CallArguments(0, "{}"), Content("bye")]),
        ("a <tool_ca", [Content("a <tool_ca")]),
    ],
)
def test_edges_of_calls(text: str, expected: list[Piece]) -> None:
    parser = HermesParser(new_id=lambda: "0")
    assert joined(parser.feed(text) + parser.finish()) == joined(expected)


def test_without_parallel_calls_only_the_first_stays() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    pieces = parse(call * 3, [], parallel=False)
    assert [type(p) for p in pieces] == [CallStart, CallArguments]


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("hi", False, [Content("hi")]),
        ("\n<think>\nlong\nthought\n</think>\n\nhi\n", False, [Reasoning("long\nthought"), Content("hi\n")]),
        ("thought</think>hi", True, [Reasoning("thought"), Content("hi")]),
        ("never closed </thi", True, [Reasoning("never closed </thi")]),
        ("<think></think>hi", False, [Content("hi")]),
        ("a <think>b</think>", False, [Content("a <think>b</think>")]),
        ("<thin", False, [Content("<thin")]),
    ],
)
def test_edges_of_reasoning(text: str, opened: bool, expected: list[Piece]) -> None:
    assert run(ThinkSplitter(opened), text, []) == expected
