"""Reading `{"name": ..., "arguments": {...}}` while it is being written."""

import json
import re
from enum import Enum, auto

MAX_NAME = 256

_STRING_END = re.compile(r'["\\]')
_NEST_EDGE = re.compile(r'["{}\[\]]')
_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class State(Enum):
    """Where the scanner stands."""

    BEFORE = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    STRING = auto()
    NESTED = auto()
    SCALAR = auto()
    AFTER = auto()
    DONE = auto()
    BROKEN = auto()


class CallScanner:
    """Character by character over one JSON object, so chunk borders make no difference.

    `name` is set once its value is complete; `wrote_arguments` once any text of the arguments came;
    `take_arguments` hands out their JSON text as far as it has come. A string value of the arguments is taken as
    JSON text in a string.
    """

    def __init__(self) -> None:
        self.state = State.BEFORE
        self.name: str | None = None
        self._key = ""  # of the value being read; "" while a key is being read
        self._parts: list[str] = []  # of the string or scalar being read
        self._arguments: list[str] = []
        self.wrote_arguments = False
        self._seen_arguments = False
        self._first = True  # no member yet: the object may still be empty
        self._depth = 0
        self._quoted = False  # inside a string of a nested value
        self._escaped = False

    def feed(self, text: str) -> int:
        """Read on; returns how many characters were taken (all, unless the object is done or broken)."""
        at = 0
        while at < len(text) and self.state not in (State.DONE, State.BROKEN):
            if self.state is State.STRING:
                at = self._string(text, at)
            elif self.state is State.NESTED:
                at = self._nested(text, at)
            elif self.state is State.SCALAR:
                at = self._scalar(text, at)
            elif text[at] in _SPACE:
                at += 1
            else:
                at += self._between(text[at])
        return at

    def take_arguments(self) -> str:
        """Arguments' text since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _argue(self, text: str) -> None:
        if text:
            self._arguments.append(text)
            self.wrote_arguments = True

    def _between(self, char: str) -> int:
        """A character outside of keys and values; 0 if it belongs to what comes next, or to nobody."""
        if self.state is State.BEFORE:
            self.state = State.KEY if char == "{" else State.BROKEN
        elif self.state is State.KEY:
            if char == '"':
                self._key = ""
                self.state = State.STRING
            else:
                self.state = State.DONE if char == "}" and self._first else State.BROKEN
        elif self.state is State.COLON:
            self.state = State.VALUE if char == ":" else State.BROKEN
        elif self.state is State.VALUE:
            self._begin_value(char)
        elif char == ",":
            self.state = State.KEY
        else:
            self.state = State.DONE if char == "}" else State.BROKEN
        if self.state is State.DONE and self.name is None:
            self.state = State.BROKEN
        return 0 if self.state in (State.BROKEN, State.SCALAR, State.NESTED) else 1

    def _begin_value(self, char: str) -> None:
        self._first = False
        if self._key in _ARGUMENT_KEYS:
            self._key = "repeated" if self._seen_arguments else "arguments"
            self._seen_arguments = True
        if self._key == "name" and (self.name is not None or char != '"'):
            self.state = State.BROKEN
        elif char == '"':
            self.state = State.STRING
        elif char in "{[":
            self._depth = 0
            self.state = State.NESTED
        else:
            self.state = State.BROKEN if char in "}]:," else State.SCALAR

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._parts.append(text[at])
            return at + 1
        match = _STRING_END.search(text, at)
        end = match.start() if match else len(text)
        self._parts.append(text[at:end])
        if match is None:
            return end
        if match.group() == "\\":
            self._parts.append("\\")
            self._escaped = True
        else:
            self._end_string()
        return end + 1

    def _end_string(self) -> None:
        raw = "".join(self._parts)
        self._parts.clear()
        try:
            value = json.loads(f'"{raw}"', strict=False)
            value.encode()  # a lone surrogate cannot be sent on
        except ValueError:
            self.state = State.BROKEN
            return
        if not self._key:
            self._key = value or "unnamed"
            self.state = State.COLON
            return
        if self._key == "name":
            if not 0 < len(value) <= MAX_NAME:
                self.state = State.BROKEN
                return
            self.name = value
        elif self._key == "arguments":
            self._argue(value)
        self.state = State.AFTER

    def _nested(self, text: str, at: int) -> int:
        end = at
        while end < len(text):
            if self._escaped:
                self._escaped = False
                end += 1
                continue
            match = (_STRING_END if self._quoted else _NEST_EDGE).search(text, end)
            if match is None:
                end = len(text)
                break
            end = match.end()
            edge = match.group()
            if edge == '"':
                self._quoted = not self._quoted
            elif edge == "\\":
                self._escaped = True
            else:
                self._depth += 1 if edge in "{[" else -1
                if self._depth == 0:
                    self.state = State.AFTER
                    break
        if self._key == "arguments":
            self._argue(text[at:end])
        return end

    def _scalar(self, text: str, at: int) -> int:
        end = at
        while end < len(text) and text[end] not in ",}" and text[end] not in _SPACE:
            end += 1
        self._parts.append(text[at:end])
        if end < len(text):
            value = "".join(self._parts)
            self._parts.clear()
            if self._key == "arguments":
                self._argue("{}" if value == "null" else value)
            self.state = State.AFTER
        return end
