"""What processes say to the owner of a tier, and how: msgpack behind a length of four bytes, big-endian.

One request is answered by one reply. Everything is bounded and checked; what does not decode is an error of the sender.
"""

import math
import socket
import struct
from typing import Annotated, Final

import msgspec

from headrace.store.catalog.catalog import TierUsage
from headrace.store.part import KEY_BYTES, PartId, PartRange

#: Keys that one request may carry.
MAX_KEYS: Final = 16384
MAX_REQUEST_BYTES: Final = 1 << 20
MAX_REPLY_BYTES: Final = 1 << 22
#: Parts that one `Adopt` may carry.
MAX_ADOPTED: Final = 4096
_MAX_LAYER: Final = 99999
LENGTH: Final = struct.Struct(">I")

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)]
Holder = Annotated[str, msgspec.Meta(max_length=200)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Find(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="find"):
    """`Catalog.find`; answered by `Found`."""

    keys: Keys


class Reserve(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="reserve"):
    """`Catalog.reserve`; answered by `Answer`."""

    part: PartId
    nbytes: Bytes
    weight: Seconds


class Written(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part that the last owner granted room for."""

    part: PartId
    nbytes: Bytes
    weight: Seconds
    sealed: bool


class Adopt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="adopt"):
    """What this process is writing, told to a new owner; answered by `Answer`."""

    parts: Annotated[list[Written], msgspec.Meta(max_length=MAX_ADOPTED)]


class Publish(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="publish"):
    """`Catalog.publish`; answered by `Answer`."""

    part: PartId


class Withdraw(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="withdraw"):
    """`Catalog.withdraw`; answered by `Answer`."""

    part: PartId


class Drop(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="drop"):
    """`Catalog.drop`; answered by `Answer`."""

    part: PartId


class Lease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="lease"):
    """`Catalog.lease`; answered by `Count`."""

    keys: Keys
    holder: Holder
    seconds: Seconds


class Release(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="release"):
    """`Catalog.release`; answered by `Answer`."""

    keys: Keys
    holder: Holder


class Leased(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="leased"):
    """`Catalog.leased`; answered by `Flags`."""

    keys: Keys
    holder: Holder


class AskUsage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="usage"):
    """`Catalog.usage`; answered by `Usage`."""


Request = Find | Reserve | Adopt | Publish | Withdraw | Drop | Lease | Release | Leased | AskUsage


class Found(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="found"):
    """The parts of chunks: most have the same ranges, so each chunk picks one of a few `shapes`."""

    shapes: list[tuple[PartRange, ...]]
    picks: list[int]


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="answer"):
    """Yes or no; done is yes."""

    yes: bool


class Count(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="count"):
    """A number of keys."""

    count: int


class Flags(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="flags"):
    """A flag for each key."""

    flags: list[bool]


class Usage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="full"):
    """How full the tier is."""

    usage: TierUsage


Reply = Found | Answer | Count | Flags | Usage

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply) -> bytes:
    """A message as it goes over the wire."""
    payload = _encoder.encode(message)
    return LENGTH.pack(len(payload)) + payload


def decode_request(payload: bytes | bytearray | memoryview) -> Request:
    """A request.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is none, or says something impossible.
    """
    request = _requests.decode(payload)
    if isinstance(request, Publish | Withdraw | Drop):
        _check(request.part)
    if isinstance(request, Adopt):
        for written in request.parts:
            _check(written.part, written.weight)
    if isinstance(request, Reserve):
        _check(request.part, request.weight)
    if isinstance(request, Lease) and not math.isfinite(request.seconds):
        raise msgspec.ValidationError(f"a lease for {request.seconds} s")
    return request


def decode_reply(payload: bytes | bytearray | memoryview) -> Reply:
    """A reply.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is none.
    """
    return _replies.decode(payload)


def found(chunks: list[tuple[PartRange, ...]]) -> Found:
    """Put what `Catalog.find` returns into a message."""
    shapes: dict[tuple[PartRange, ...], int] = {}
    picks = [shapes.setdefault(ranges, len(shapes)) for ranges in chunks]
    return Found(list(shapes), picks)


def peer_is_us(connection: socket.socket, uid: int) -> bool:
    """True when the process at the other end runs as `uid` (where the system tells; the folder's mode guards too)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == uid)


def _check(part: PartId, weight: float = 0.0) -> None:
    if len(part.key) != KEY_BYTES or not part.range.valid or max(part.range) > _MAX_LAYER or not math.isfinite(weight):
        raise msgspec.ValidationError(f"no part: {part}, weight {weight}")
