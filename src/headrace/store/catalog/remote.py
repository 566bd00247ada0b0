"""The catalog of a tier that another process owns: one connection, one request at a time, a deadline for each."""

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.core.errors import HeadraceError
from headrace.store.catalog.catalog import TierUsage
from headrace.store.catalog.messages import (
    LENGTH,
    MAX_ADOPTED,
    MAX_KEYS,
    MAX_REPLY_BYTES,
    Adopt,
    Answer,
    AskUsage,
    Count,
    Drop,
    Find,
    Flags,
    Found,
    Lease,
    Leased,
    Publish,
    Release,
    Reply,
    Request,
    Reserve,
    Usage,
    Withdraw,
    Written,
    decode_reply,
    frame,
    peer_is_us,
)
from headrace.store.part import PartId, PartRange

R = TypeVar("R", Found, Answer, Count, Flags, Usage)


class Unanswered(HeadraceError):
    """The owner did not answer in time, or is gone."""


class RemoteCatalog:
    """See `Catalog`; every call may raise `Unanswered`. Once `broken` it stays so.

    Args:
        address: the owner's socket.
        timeout: seconds that a call may take, waiting for other threads' calls included.

    Raises:
        OSError: nobody answers there, or another user does.
    """

    def __init__(self, address: Path, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._broken = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(str(address))
            if not peer_is_us(self._socket, os.getuid()):
                raise PermissionError(f"the owner at {address} is another user")
        except OSError:
            self._socket.close()
            raise

    @property
    def broken(self) -> bool:
        """True once the connection is of no use."""
        return self._broken

    def fileno(self) -> int:
        """The connection, to wait for its end."""
        return self._socket.fileno()

    def find(self, keys: Sequence[bytes]) -> list[tuple[PartRange, ...]]:
        """See `Catalog.find`."""
        found = self._ask(Find(list(keys[:MAX_KEYS])), Found)
        shapes = found.shapes
        return [shapes[pick] for pick in found.picks]

    def reserve(self, part: PartId, nbytes: int, weight: float) -> bool:
        """See `Catalog.reserve`."""
        return self._ask(Reserve(part, nbytes, weight), Answer).yes

    def adopt(self, parts: Sequence[Written]) -> None:
        """Tell a new owner what this process is writing; also the question whether it answers at all."""
        for first in range(0, max(1, len(parts)), MAX_ADOPTED):
            self._ask(Adopt(list(parts[first : first + MAX_ADOPTED])), Answer)

    def publish(self, part: PartId) -> None:
        """See `Catalog.publish`."""
        self._ask(Publish(part), Answer)

    def withdraw(self, part: PartId) -> None:
        """See `Catalog.withdraw`."""
        self._ask(Withdraw(part), Answer)

    def drop(self, part: PartId) -> None:
        """See `Catalog.drop`."""
        self._ask(Drop(part), Answer)

    def lease(self, keys: Sequence[bytes], holder: str, seconds: float) -> int:
        """See `Catalog.lease`."""
        return self._ask(Lease(list(keys[:MAX_KEYS]), holder, seconds), Count).count

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        """See `Catalog.release`."""
        for first in range(0, len(keys), MAX_KEYS):
            self._ask(Release(list(keys[first : first + MAX_KEYS]), holder), Answer)

    def leased(self, keys: Sequence[bytes], holder: str) -> list[bool]:
        """See `Catalog.leased`."""
        flags: list[bool] = []
        for first in range(0, len(keys), MAX_KEYS):
            flags += self._ask(Leased(list(keys[first : first + MAX_KEYS]), holder), Flags).flags
        return flags

    def usage(self) -> TierUsage:
        """See `Catalog.usage`."""
        return self._ask(AskUsage(), Usage).usage

    def close(self) -> None:
        """Disconnect; calls under way end."""
        self._broken = True
        with suppress(OSError):  # gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._socket.close()

    def _ask(self, request: Request, kind: type[R]) -> R:
        deadline = time.monotonic() + self._timeout
        if not self._lock.acquire(timeout=self._timeout):
            raise Unanswered("other calls take too long")
        try:
            if self._broken:
                raise Unanswered("disconnected")
            reply = self._exchange(frame(request), deadline)
            if not isinstance(reply, kind):
                raise msgspec.ValidationError(f"{type(reply).__name__} instead of {kind.__name__}")
            return reply
        except (OSError, msgspec.MsgspecError) as error:
            self._broken = True  # a late answer must not be taken for that to the next request
            raise Unanswered(str(error)) from error
        finally:
            self._lock.release()

    def _exchange(self, request: bytes, deadline: float) -> Reply:
        connection = self._socket
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        connection.sendall(request)
        received = bytearray()
        size = LENGTH.size
        while len(received) < size:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            data = connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the owner is gone")
            received += data
            if size == LENGTH.size and len(received) >= size:
                size += LENGTH.unpack_from(received)[0]
                if size > MAX_REPLY_BYTES + LENGTH.size:
                    raise msgspec.ValidationError(f"a reply of {size} bytes")
        return decode_reply(bytes(memoryview(received)[LENGTH.size :]))
