"""Tool calls in the Hermes dialect: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` inside the text."""

import uuid
from collections.abc import Callable

from headrace.api.call_scanner import CallScanner, State
from headrace.api.pieces import CallArguments, CallStart, Content, Piece, partial_suffix

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def new_call_id() -> str:
    """An id as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


class HermesParser:
    """Incremental: however the text is cut into chunks, the joined result is the same.

    What only looks like a call (no JSON object, no name) stays text, word for word. White space around calls
    belongs to nobody.

    Args:
        parallel: False keeps the first call only.
        new_id: makes the calls' ids.
    """

    def __init__(self, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> None:
        self.calls = 0
        self._parallel = parallel
        self._new_id = new_id
        self._state = "text"
        self._held = ""
        self._raw = ""  # of the call, while it may still turn out to be text
        self._scanner = CallScanner()
        self._index = -1  # of the call being read; -1 before its name is known
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        """Take new text; return what is certain by now."""
        self._held += text
        out: list[Piece] = []
        step = {"text": self._text, "call": self._call, "closing": self._closing}
        while self._held and step[self._state](out):
            pass
        return out

    def finish(self) -> list[Piece]:
        """The text is over: what was held back is what it looks like."""
        held, self._held = self._held, ""
        out: list[Piece] = []
        if self._state == "call":
            if self._index < 0:
                self._content(OPEN + self._raw, out)
        elif self._state == "closing":
            self._content(held.strip(), out)
        else:
            self._content(held.rstrip() if self.calls else held, out)
        return out

    def _text(self, out: list[Piece]) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        start = self._held.find(OPEN)
        if start >= 0:
            self._content(self._held[:start].rstrip(), out)
            self._held = self._held[start + len(OPEN) :]
            self._begin_call()
            return True
        certain = self._held[: len(self._held) - partial_suffix(self._held, OPEN)].rstrip()
        self._content(certain, out)
        self._held = self._held[len(certain) :]
        return False

    def _begin_call(self) -> None:
        self._state = "call"
        self._scanner = CallScanner()
        self._raw = ""
        self._index = -1

    def _call(self, out: list[Piece]) -> bool:
        taken = self._scanner.feed(self._held)
        read, self._held = self._held[:taken], self._held[taken:]
        scanner = self._scanner
        if self._index < 0:
            self._raw += read
            if scanner.name is not None:
                self._index = self.calls
                self.calls += 1
                self._emit(CallStart(self._index, self._new_id(), scanner.name), out)
        if self._index >= 0:
            arguments = scanner.take_arguments()
            if not arguments and scanner.state is State.DONE and not scanner.wrote_arguments:
                arguments = "{}"
            if arguments:
                self._emit(CallArguments(self._index, arguments), out)
        if scanner.state is State.BROKEN and self._index < 0:
            self._content(OPEN + self._raw, out)
            self._state = "text"
            return True
        if scanner.state in (State.DONE, State.BROKEN):
            self._state = "closing"
            return True
        return False

    def _closing(self, out: list[Piece]) -> bool:
        close, again = self._held.find(CLOSE), self._held.find(OPEN)
        if close >= 0 and (again < 0 or close < again):
            self._held = self._held[close + len(CLOSE) :]
            self._state = "text"
            self._after_call = True
            return True
        if again >= 0:
            self._content(self._held[:again].strip(), out)
            self._held = self._held[again + len(OPEN) :]
            self._begin_call()
            return True
        return False

    def _content(self, text: str, out: list[Piece]) -> None:
        if text:
            out.append(Content(text))

    def _emit(self, piece: CallStart | CallArguments, out: list[Piece]) -> None:
        if self._parallel or piece.index == 0:
            out.append(piece)
