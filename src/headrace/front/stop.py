"""Stop strings over a stream of text."""

from collections import deque
from collections.abc import Sequence


class StopSet:
    """An automaton over the stop strings of a request (Aho and Corasick, CACM 18(6), 1975).

    Its state after any text is the longest suffix of the text that could begin a stop string, so each character costs
    the same however many and however long the stop strings are. Shared by the sequences of a request.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """Length of the suffix that each state stands for."""
        self.match: list[str | None] = [None]
        """The longest stop string that ends in each state."""
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                if self.match[child] is None:
                    self.match[child] = self.match[self._fail[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self._next[state][character]
        self.match[state] = stop


class StopBuffer:
    """Passes text on, less what might be or follow a stop string.

    The text ends where the first stop string is complete (the longest, where several end there), so what comes out
    does not depend on how the text is cut into tokens.

    Args:
        stops: the automaton.
        include: leave the stop string itself in the text.
    """

    def __init__(self, stops: StopSet, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, once one did."""

    def push(self, text: str) -> str:
        """The part of the text so far that is certain and not out yet; after a match nothing comes out any more."""
        if self.matched is not None:
            return ""
        stops, state = self._stops, self._state
        for position, character in enumerate(text):
            state = stops.step(state, character)
            found = stops.match[state]
            if found is not None:
                self.matched = found
                kept = self._held + text[: position + 1]
                self._held = ""
                return kept if self._include else kept[: len(kept) - len(found)]
        self._state = state
        certain = self._held + text
        held = stops.depth[state]
        self._held = certain[len(certain) - held :]
        return certain[: len(certain) - held]

    def flush(self) -> str:
        """The end of the stream: what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held
