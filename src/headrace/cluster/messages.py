"""What a front and a worker say to each other: msgspec structs, MessagePack on the wire."""

import msgspec

from headrace.core.config import EngineConfig
from headrace.core.events import Delta, EngineInfo, EngineStats
from headrace.core.request import Request

PROTOCOL = 1


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Front to worker, first: load this; so many workers, this one too, share the host's free memory."""

    config: EngineConfig
    sharers: int = 1


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Front to worker: generate."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Front to worker: stop these requests."""

    requests: list[str]


class Pace(msgspec.Struct, frozen=True, tag="pace"):
    """Front to worker: offline prompts are to fill steps up to so many tokens only; None: as far as they go."""

    tokens: int | None


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Front to worker: end the process."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Worker to front, first: I am here."""

    pid: int
    protocol: int = PROTOCOL


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Worker to front: how far loading is, 0..1 of a phase."""

    phase: str
    done: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Worker to front: loaded."""

    info: EngineInfo


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """Worker to front: what a step brought, and the engine's counters."""

    deltas: list[Delta]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Worker to front: the engine cannot start or go on; one line. `expected` errors are the user's to mend."""

    error: str
    expected: bool


ToWorker = Start | Submit | Abort | Pace | Stop
FromWorker = Hello | Loading | Ready | Stepped | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
