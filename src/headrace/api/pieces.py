"""What a chat answer's text is made of, as the parsers hand it on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: its place among the calls, its id and the function's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


def partial_suffix(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that `tag` begins with, short of the whole tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
