"""Who may call what."""

import hmac
from collections.abc import Iterable

from headrace.api.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/metrics"})


def check_key(expected: str | None, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise the 401 of a request without the server's key; `OPEN_PATHS` need none.

    The comparison takes the same time wherever the keys differ.
    """
    if expected is None or path in OPEN_PATHS:
        return
    given = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), expected.encode()):
        return
    message = "Incorrect API key; send it as `Authorization: Bearer KEY`" if given else "This server needs an API key"
    raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
