"""What single tokens stand for, in bytes, by the two ways tokenizers spell text."""

import json
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_SPACE = "▁"


def _byte_alphabet() -> dict[str, int]:
    """The printable character by which a byte-level vocabulary spells each byte (GPT-2, Radford et al. 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class TokenPieces:
    """The bytes of each token; a text is the bytes of its tokens joined, read as UTF-8.

    That holds for byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM) and for sentencepiece-like ones (Llama 2,
    Mistral, Gemma, Phi-3), whose decoders besides strip one space at the start of a text; a generated text is the
    middle of one, so its leading space stays. `whole` tells whether the tokenizer is one of these.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, bytes] = {}
        steps = _flatten(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder is not None else []
        kinds = {step["type"] for step in steps}
        self._byte_level = kinds == {"ByteLevel"}
        self._byte_fallback = "ByteFallback" in kinds
        spaced = any(_spells_space(step) for step in steps)
        self._spaced = spaced and all(_spells_space(step) or _passive(step) for step in steps)
        self.whole = self._byte_level or self._spaced

    def __getitem__(self, token: int) -> bytes:
        """The bytes of `token`; empty for an id that no token has."""
        known = self._cache.get(token)
        if known is None:
            known = self._cache[token] = self._bytes(token)
        return known

    def _bytes(self, token: int) -> bytes:
        spelling = self._tokenizer.id_to_token(token)
        if spelling is None:
            return b""
        if self._byte_level:
            values = [_BYTES.get(character) for character in spelling]
            if any(value is None for value in values):  # an added token, spelt as it reads
                return str(spelling).encode()
            return bytes(value for value in values if value is not None)
        if self._spaced:
            if self._byte_fallback and len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
                try:
                    return bytes([int(spelling[3:5], 16)])
                except ValueError:
                    pass  # six characters that only look like a byte
            return str(spelling).replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _spells_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("replacement") == _SPACE)
    return bool(step["type"] == "Replace" and step["pattern"] == {"String": _SPACE} and step["content"] == " ")


def _passive(step: dict[str, Any]) -> bool:
    strips = step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) <= 1
    return step["type"] in ("ByteFallback", "Fuse") or bool(strips and step.get("stop", 0) == 0)
