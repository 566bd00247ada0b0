"""Splitting `<think>...</think>` from the answer, as the text arrives."""

from headrace.api.pieces import Content, Piece, Reasoning, partial_suffix

OPEN = "<think>"
CLOSE = "</think>"


class ThinkSplitter:
    """Incremental: however the text is cut into chunks, the joined result is the same.

    White space around the reasoning belongs to neither side. Text that does not begin with `<think>` is an answer
    from its first character, unless the prompt had already opened the tag.

    Args:
        opened: the prompt ends inside `<think>`.
    """

    def __init__(self, opened: bool) -> None:
        self._state = "before_thought" if opened else "start"
        self._held = ""

    @property
    def thinking(self) -> bool:
        """True while what arrives is reasoning."""
        return self._state in ("before_thought", "thought")

    def feed(self, text: str) -> list[Piece]:
        """Take new text; return what is certain by now."""
        if self._state == "answer":
            return [Content(text)] if text else []
        self._held += text
        out: list[Piece] = []
        if self._state == "start":
            self._start(out)
        if self._state == "before_thought":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "thought"
        if self._state == "thought":
            self._thought(out)
        if self._state == "before_answer":
            self._held = self._held.lstrip()
            if self._held:
                self._answer(out)
        return out

    def finish(self) -> list[Piece]:
        """The text is over: what was held back is what it looks like."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held)] if self._state == "thought" else [Content(held)]

    def _start(self, out: list[Piece]) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held = text[len(OPEN) :]
            self._state = "before_thought"
        elif not OPEN.startswith(text):
            self._answer(out)

    def _thought(self, out: list[Piece]) -> None:
        end = self._held.find(CLOSE)
        if end >= 0:
            certain, self._held = self._held[:end].rstrip(), self._held[end + len(CLOSE) :]
            self._state = "before_answer"
        else:
            certain = self._held[: len(self._held) - partial_suffix(self._held, CLOSE)].rstrip()
            self._held = self._held[len(certain) :]
        if certain:
            out.append(Reasoning(certain))

    def _answer(self, out: list[Piece]) -> None:
        self._state = "answer"
        out.append(Content(self._held))
        self._held = ""
