"""How long files are kept: OpenAI's `expires_after` of an upload and `output_expires_after` of a batch."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from headrace.api.schema import wrong_type
from headrace.core.errors import InvalidRequest


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
    asked = {
        name: fields[field]
        for name in ExpiresAfter.__struct_fields__
        if (field := f"expires_after[{name}]") in fields
    }  # fmt: skip
    for name in fields:
        if name.startswith("expires_after") and name.removeprefix("expires_after") not in ("[anchor]", "[seconds]"):
            said = (
                "name the end of a file by the fields `expires_after[anchor]` and `expires_after[seconds]` of the form"
            )
            raise InvalidRequest(f"{said}, got {name[:100]!r}", "expires_after")
    if not asked:
        return None
    try:
        return msgspec.convert({"expires_after": asked}, _Form, strict=False).expires_after.seconds
    except msgspec.ValidationError as error:
        raise wrong_type(str(error)) from None
