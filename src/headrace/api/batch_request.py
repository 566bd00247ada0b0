"""What POST /v1/batches asks for."""

import re

import msgspec

from headrace.api.expiry import ExpiresAfter
from headrace.api.file_info import FILE_ID, no_file
from headrace.core.errors import InvalidRequest
from headrace.core.settings import parse_duration
from headrace.offline.jobs.lines import URLS

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
SHORTEST_S, LONGEST_S = 1.0, 30 * 86400.0

_WINDOW = re.compile(r"[0-9]{1,7}[smhd]")


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window(self) -> float:
        """Seconds that the batch may take; 0 where what is asked for is no duration."""
        text = self.completion_window
        return parse_duration(text) if _WINDOW.fullmatch(text) else 0.0


def check(asked: BatchRequest) -> None:
    """Refuse what cannot be.

    Raises:
        InvalidRequest, ApiError: a field is wrong.
    """
    if not FILE_ID.fullmatch(asked.input_file_id):
        raise no_file(asked.input_file_id)
    if asked.endpoint not in URLS:
        raise InvalidRequest(f"`endpoint` must be {' or '.join(URLS)}, got {asked.endpoint[:100]!r}", "endpoint")
    metadata = asked.metadata or {}
    if len(metadata) > MAX_METADATA or any(len(k) > MAX_KEY or len(v) > MAX_VALUE for k, v in metadata.items()):
        raise InvalidRequest(
            f"`metadata` has at most {MAX_METADATA} pairs, keys of {MAX_KEY} and values of {MAX_VALUE} characters",
            "metadata",
        )
    if not SHORTEST_S <= asked.window <= LONGEST_S:
        text = asked.completion_window
        raise InvalidRequest(
            f"`completion_window` must be a duration such as 24h, 90m or 7d (up to 30d), got {text[:100]!r}",
            "completion_window",
        )
