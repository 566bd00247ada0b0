"""How long files are kept: OpenAI's `expires_after` of an upload and `output_expires_after` of a batch."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from headrace.api.schema import wrong_type
from headrace.core.errors import InvalidRequest

_FIELD = re.compile(r"expires_after\[(anchor|seconds)\]")


class ExpiresAfter(msgspec.Struct, frozen=True):
    """When a file expires.

    Attributes:
        anchor: from when on it is counted, of the file itself.
        seconds: an hour to 30 days.
    """

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=30 * 86400)]


class _Form(msgspec.Struct):
    expires_after: ExpiresAfter


def expiry_of(fields: Mapping[str, str]) -> int | None:
    """Seconds that the fields of a form give its file; None where they name no end.

    Raises:
        InvalidRequest: a field is missing or wrong.
    """
    asked = {}
    for field, value in fields.items():
        named = _FIELD.fullmatch(field)
        if named is not None:
            asked[named[1]] = value
        elif field.startswith("expires_after"):
            said = (
                "the end of a file is named by the form's fields `expires_after[anchor]` and `expires_after[seconds]`"
            )
            raise InvalidRequest(f"{said}, got {field[:100]!r}", "expires_after")
    if not asked:
        return None
    try:
        return msgspec.convert({"expires_after": asked}, _Form, strict=False).expires_after.seconds
    except msgspec.ValidationError as error:
        raise wrong_type(str(error)) from None
