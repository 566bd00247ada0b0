"""The owner's end of the socket: one thread that answers all other processes of the node.

A client sends one request and waits for its reply. Who sends something else, more than a request may be, or comes from
another user is disconnected; nothing that a client does can make buffers grow or others wait for its bytes.
"""

import itertools
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.store.catalog.local import LocalCatalog
from headrace.store.catalog.messages import (
    LENGTH,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    Adopt,
    Answer,
    AskUsage,
    Count,
    Drop,
    Find,
    Flags,
    Lease,
    Leased,
    Publish,
    Release,
    Reply,
    Request,
    Reserve,
    Usage,
    Withdraw,
    decode_request,
    found,
    frame,
    peer_is_us,
)

_log = logging.getLogger(__name__)

#: Connections at once; one more costs the one that has been silent longest, unknown ones first.
MAX_CLIENTS = 256
_RECEIVE_BYTES = 1 << 16
#: Names under which one client may hold leases at once.
_MAX_LEASE_HOLDERS = 4096
#: Seconds without new connections after the system had no descriptor left for one.
_ACCEPT_PAUSE = 0.5


class _Misbehaved(Exception):
    """A client has to go."""


class _Client:
    """A connection, what has come of its request and what is left of the reply to it."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection = connection
        self.name = name
        self.lease_holders: set[str] = set()
        self.received = bytearray()
        self.to_send = memoryview(b"")
        self.served = 0
        self.last_served = 0


class CatalogServer:
    """Answers for a catalog until closed.

    Args:
        catalog: the owner's.
        listener: a bound and listening unix socket; closed with the server.
        address: where it is bound.
        client_lost: called in the server's thread when a client is gone that may have left something behind.
    """

    def __init__(
        self, catalog: LocalCatalog, listener: socket.socket, address: Path, client_lost: Callable[[], None]
    ) -> None:
        self.address = address
        self._catalog = catalog
        self._listener = listener
        self._client_lost = client_lost
        self._uid = os.getuid()
        self._names = itertools.count(1)
        self._requests = itertools.count(1)
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._accepting = True
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"headrace-catalog-server-{catalog.tier.name}", daemon=True
        )
        self._thread.start()

    @property
    def clients(self) -> int:
        """Connections now."""
        return len(self._clients)

    def stop(self) -> None:
        """Answer nobody any more; connections stay open until `close`, so that nobody looks for an heir yet."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._wake_out.send(b"x")
            self._thread.join()

    def close(self) -> None:
        """Stop and disconnect everybody."""
        self.stop()
        self._selector.close()
        for opened in (self._listener, self._wake_in, self._wake_out, *(c.connection for c in self._clients)):
            opened.close()
        self._clients.clear()

    def _run(self) -> None:
        while not self._stopping.is_set():
            events = self._selector.select(None if self._accepting else _ACCEPT_PAUSE)
            if not self._accepting:
                self._accepting = True
                self._selector.register(self._listener, selectors.EVENT_READ)
            for key, mask in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None and key.data in self._clients:
                    self._serve(key.data, mask)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            _log.warning("no new connections to %s for %g s: %s", self._catalog.tier.name, _ACCEPT_PAUSE, error)
            self._selector.unregister(self._listener)
            self._accepting = False
            return
        if not peer_is_us(connection, self._uid):
            connection.close()
            return
        connection.setblocking(False)
        if len(self._clients) >= MAX_CLIENTS:
            self._lose(min(self._clients, key=lambda client: (client.served > 0, client.last_served)))
        client = _Client(connection, f"client-{next(self._names)}")
        client.last_served = next(self._requests)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve(self, client: _Client, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._send(client)
            elif mask & selectors.EVENT_READ:
                self._receive(client)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, _Misbehaved) as error:
            if not isinstance(error, ConnectionError):
                _log.warning("a client of %s is disconnected: %s", self._catalog.tier.name, error)
            self._lose(client)

    def _receive(self, client: _Client) -> None:
        data = client.connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError
        received = client.received
        received += data
        if len(received) < LENGTH.size:
            return
        (size,) = LENGTH.unpack_from(received)
        if size > MAX_REQUEST_BYTES or len(received) > LENGTH.size + size:
            raise _Misbehaved(f"a request of {size} bytes, {len(received)} received")
        if len(received) < LENGTH.size + size:
            return
        request = decode_request(bytes(memoryview(received)[LENGTH.size :]))
        received.clear()
        client.to_send = memoryview(self._reply(client, request))
        client.served += 1
        client.last_served = next(self._requests)
        self._selector.modify(client.connection, selectors.EVENT_WRITE, client)
        self._send(client)

    def _reply(self, client: _Client, request: Request) -> bytes:
        reply = self._answer(client, request)
        data = frame(reply)
        if len(data) > MAX_REPLY_BYTES:  # thousands of chunks, each with parts of its own kind: a shorter prefix does
            data = frame(found(self._catalog.find(request.keys[:1]))) if isinstance(request, Find) else data
        return data

    def _send(self, client: _Client) -> None:
        client.to_send = client.to_send[client.connection.send(client.to_send) :]
        if not client.to_send:
            self._selector.modify(client.connection, selectors.EVENT_READ, client)

    def _lose(self, client: _Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        self._catalog.abandon(client.name, tuple(client.lease_holders))
        self._client_lost()

    def _answer(self, client: _Client, request: Request) -> Reply:
        catalog, name = self._catalog, client.name
        match request:
            case Find():
                return found(catalog.find(request.keys))
            case Reserve():
                return Answer(catalog.reserve(request.part, request.nbytes, request.weight, name))
            case Adopt():
                for written in request.parts:
                    catalog.adopt(written.part, written.nbytes, written.weight, name)
                    if written.sealed:
                        catalog.publish(written.part, name)
            case Publish():
                catalog.publish(request.part, name)
            case Withdraw():
                catalog.withdraw(request.part, name)
            case Drop():
                catalog.drop(request.part)
            case Lease():
                self._note_holder(client, request.holder)
                return Count(catalog.lease(request.keys, request.holder, request.seconds))
            case Release():
                catalog.release(request.keys, request.holder)
            case Leased():
                return Flags(catalog.leased(request.keys, request.holder))
            case AskUsage():
                return Usage(catalog.usage())
        return Answer(True)

    def _note_holder(self, client: _Client, holder: str) -> None:
        client.lease_holders.add(holder)
        if len(client.lease_holders) > _MAX_LEASE_HOLDERS:
            client.lease_holders = {name for name in client.lease_holders if self._catalog.holds_leases(name)}
            if len(client.lease_holders) > _MAX_LEASE_HOLDERS:
                raise _Misbehaved(f"leases under more than {_MAX_LEASE_HOLDERS} names")
