"""Which requests are thought to have answers of like length."""

import math
from collections.abc import Iterable

import xxhash


def kin(url: str, most: int, instructions: Iterable[bytes] = ()) -> bytes:
    """Equal for relatives: route, instructions, and `most` to the next power of two.

    Args:
        url: the route.
        most: tokens that all sequences of the request may generate together.
        instructions: contents of its system messages, all of them, as JSON.
    """
    digest = xxhash.xxh3_128(f"{url} {math.ceil(math.log2(most + 1))}".encode())
    for content in instructions:
        digest.update(content)
    return digest.digest()
