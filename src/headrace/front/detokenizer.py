"""Text out of tokens as they come."""

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol

from headrace.front.pieces import TokenPieces


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text; costs the same per token however long the text is."""

    def push(self, token: int) -> str:
        """The text that has become certain with `token`; a character that lacks bytes is held back."""
        ...

    def flush(self) -> str:
        """The end: what was held back, incomplete characters as U+FFFD."""
        ...


class BytesDetokenizer:
    """For tokenizers whose text is the bytes of its tokens joined (`TokenPieces.whole`).

    Args:
        pieces: bytes of each token.
        skipped: special tokens to leave out of the text.
    """

    def __init__(self, pieces: TokenPieces, skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """See `Detokenizer.push`."""
        return "" if token in self._skipped else self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window, whose start is text that is already out.

    What a token adds is what the window's text grows by. The window starts anew at each growth, so it is a few tokens
    long; where nothing certain comes for `LIMIT` tokens (a text of U+FFFD characters), they count as certain.

    Args:
        decode: the whole decoding of a list of tokens.
        skipped: special tokens to leave out of the text.
    """

    LIMIT = 16

    def __init__(self, decode: Callable[[list[int]], str], skipped: frozenset[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """See `Detokenizer.push`."""
        if token in self._skipped:
            return ""
        self._pending.append(token)
        grown = self._grown()
        if not grown or (grown.endswith("\ufffd") and len(self._pending) < self.LIMIT):
            return ""
        self._context, self._pending = self._pending, []
        return grown

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        grown = self._grown() if self._pending else ""
        self._context, self._pending = self._pending or self._context, []
        return grown

    def _grown(self) -> str:
        before = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._pending)[len(before) :]


def detokenize(detokenizer: Detokenizer, tokens: Iterable[int]) -> str:
    """The text of `tokens` in one go: what `push` and `flush` yield, joined."""
    return "".join([*map(detokenizer.push, tokens), detokenizer.flush()])
