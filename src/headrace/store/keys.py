"""Names of chunks: a hash chain over token ids."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from headrace.store.part import KEY_BYTES

SALT_TAG_BYTES = 8

_ROOT = b"headrace-store"
_CHUNK = b"headrace-chunk"
_SALT = b"headrace-salt"


def salt_tag(salt: str) -> bytes:
    """What marks parts of a salt, so that all of them can be found and purged: a short hash; zeros for no salt."""
    if not salt:
        return bytes(SALT_TAG_BYTES)
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=SALT_TAG_BYTES, person=_SALT).digest()


class ChunkHasher:
    """Keys of chunks: `key[i] = H(key[i-1] || tokens of chunk i)`, `key[-1] = H(fingerprint, salt)`.

    The hash is a cryptographic one (BLAKE2b, 256 bits), so equal keys mean equal prefixes under the same model and
    salt even for crafted prompts. Tokens enter as little-endian int32, so keys are the same in every process, run and
    machine. Keys of pages (`engine.prefix_index`) are of another kind: their hash is personalised differently.

    Args:
        fingerprint: of the model whose KV it is, see `KVLayout.fingerprint`.
        chunk_tokens: tokens of a full chunk.
    """

    def __init__(self, fingerprint: str, chunk_tokens: int) -> None:
        self._fingerprint = fingerprint.encode()
        self._chunk_tokens = chunk_tokens

    def root(self, salt: str) -> bytes:
        """The key before the first chunk. Another salt shares nothing."""
        digest = blake2b(digest_size=KEY_BYTES, person=_ROOT)
        # With its length in front, no fingerprint can end where a salt begins.
        digest.update(len(self._fingerprint).to_bytes(4, "little"))
        digest.update(self._fingerprint)
        digest.update(salt.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def extend(self, known: Sequence[bytes], tokens: NDArray[np.int32], salt: str) -> list[bytes]:
        """Keys of all full chunks.

        Args:
            known: keys of the first chunks, from an earlier call with a prefix of these tokens; not hashed again.
            tokens: token ids from the start of the prompt, `[n]`.
            salt: the request's cache salt.

        Returns:
            `len(tokens) // chunk_tokens` keys, or `known` when that is longer.
        """
        size = self._chunk_tokens
        keys = list(known)
        key = keys[-1] if keys else self.root(salt)
        ids: NDArray[np.int32] = tokens.astype("<i4", copy=False)
        for chunk in range(len(keys), len(tokens) // size):
            key = self.after(key, ids[chunk * size : (chunk + 1) * size])
            keys.append(key)
        return keys

    def after(self, key: bytes, tokens: NDArray[np.int32]) -> bytes:
        """The key of the chunk of these tokens that follows the one with `key`; at a hand-over it may be short."""
        return blake2b(key + tokens.astype("<i4", copy=False).tobytes(), digest_size=KEY_BYTES, person=_CHUNK).digest()
