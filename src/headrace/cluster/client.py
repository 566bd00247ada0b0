"""The front's end of an engine in another process."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq
import zmq.asyncio

from headrace.cluster.messages import (
    Abort,
    Failed,
    FromWorker,
    Hello,
    Loading,
    Pace,
    Ready,
    Start,
    Stepped,
    Stop,
    Submit,
    ToWorker,
    decode_from_worker,
    encode,
)
from headrace.core.config import EngineConfig
from headrace.core.errors import EngineDead, HeadraceError, InvalidRequest, QueueFull
from headrace.core.events import Delta, EngineInfo, EngineStats
from headrace.core.request import Request

Progress = Callable[[str, float], None]

#: The time that an engine may be silent is waited for in so many parts: what stops this process too (a suspended
#: machine, a debugger) makes one of them longer, not the engine silent.
PATIENCE = 10
#: A worker that is told to end, and does not take the message or does not end within this time, is ended.
STOP_SECONDS = 10.0

log = logging.getLogger(__name__)


class Stream:
    """Deltas of one request on their way to its reader. Bounded by what the request may generate.

    An object rather than a generator: `aclose` must abort the request also when nobody has read yet.
    """

    __slots__ = ("_client", "_deltas", "_done", "_error", "_request", "_wake")

    def __init__(self, client: "WorkerClient", request_id: str) -> None:
        self._client = client
        self._request = request_id
        self._deltas: deque[Delta] = deque()
        self._wake = asyncio.Event()
        self._error: HeadraceError | None = None
        self._done = False

    def put(self, delta: Delta) -> None:
        """Add a delta."""
        self._deltas.append(delta)
        self._wake.set()

    def fail(self, error: HeadraceError) -> None:
        """Make the reader raise once it has read what is there."""
        self._error = error
        self._wake.set()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        if self._done:
            raise StopAsyncIteration
        while not self._deltas:
            if self._error is not None:
                self._end()
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        delta = self._deltas.popleft()
        if delta.finish is not None:
            self._end()
        return delta

    async def aclose(self) -> None:
        """Stop reading; the request is aborted if it is not finished. Harmless when repeated."""
        if not self._done:
            self._client.abort(self._request)
            self._end()

    def _end(self) -> None:
        self._done = True
        self._client.forget(self._request)


class WorkerClient:
    """An `EngineClient` over ZeroMQ. Made by a launcher; belongs to one event loop.

    Args:
        socket: a ROUTER that the worker's DEALER connects to.
        identity: the worker's.
        config: of its engine.
        sharers: workers that share the host's free memory, this one counted.
    """

    def __init__(self, socket: zmq.asyncio.Socket, identity: bytes, config: EngineConfig, sharers: int = 1) -> None:
        self._socket = socket
        self._identity = identity
        self._config = config
        self._sharers = sharers
        self._streams: dict[str, Stream] = {}
        self._observer: Callable[[EngineStats], None] | None = None
        self._stats = EngineStats()
        self._info: EngineInfo | None = None
        self._dead: HeadraceError | None = None
        self._outbox: deque[ToWorker] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._heard = False
        self._guard: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        if self._info is None:
            raise EngineDead("the engine is not ready")
        return self._info

    @property
    def dead(self) -> HeadraceError | None:
        """Why the engine ended, if it did."""
        return self._dead

    async def start(self, progress: Progress | None = None) -> None:
        """Send the configuration and wait until the engine is ready.

        Raises:
            HeadraceError: it cannot start; the message is the worker's.
            EngineDead: the process ended (`lost` was called).
        """
        self._ready = asyncio.get_running_loop().create_future()
        self._receiver = asyncio.create_task(self._receive(self._ready, progress))
        await self._ready
        if self._config.scheduler.step_timeout:
            self._guard = asyncio.create_task(self._watch_for_silence(self._config.scheduler.step_timeout))

    def lost(self, error: HeadraceError) -> None:
        """The worker is gone: every stream fails."""
        if self._dead is None:
            self._dead = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._dead)
        for stream in self._streams.values():
            stream.fail(self._dead)

    def hung(self, error: EngineDead) -> None:
        """The worker has been silent for too long: it is lost, and whoever can ends it."""
        self.lost(error)

    def observe(self, observer: Callable[[EngineStats], None] | None) -> None:
        """Have the counters told after every step that brought something; None: no more."""
        self._observer = observer

    def submit(self, request: Request) -> Stream:
        """See `EngineClient.submit`."""
        if self._dead is not None:
            raise self._dead
        limit = self._config.scheduler.max_queue
        if len(self._streams) >= limit:
            raise QueueFull(f"{limit} requests are in flight already; try again later")
        if request.id in self._streams:
            raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
        stream = self._streams[request.id] = Stream(self, request.id)
        self._send(Submit(request))
        return stream

    def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        if request_id in self._streams and self._dead is None:
            self._send(Abort([request_id]))

    def pace(self, tokens: int | None) -> None:
        """See `EngineClient.pace`."""
        if self._dead is None:
            self._send(Pace(tokens))

    def forget(self, request_id: str) -> None:
        """Nobody reads this request's deltas any more."""
        self._streams.pop(request_id, None)

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        return self._stats

    async def close(self) -> None:
        """End the worker."""
        if self._dead is None:
            self._send(Stop())
            self.lost(EngineDead("the engine was closed"))
        if self._sending is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sending, STOP_SECONDS)
        for task in (self._guard, self._receiver):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._socket.close(linger=500)

    def _send(self, message: ToWorker) -> None:
        """Queue a message; the queue is bounded by the requests in flight. Of paces only the last one counts."""
        if isinstance(message, Pace) and self._outbox and isinstance(self._outbox[-1], Pace):
            self._outbox.pop()
        self._outbox.append(message)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        while self._outbox:
            try:
                await self._socket.send_multipart([self._identity, encode(self._outbox.popleft())])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._outbox.clear()
                self.lost(EngineDead("the engine does not answer any more"))

    async def _receive(self, ready: "asyncio.Future[None]", progress: Progress | None) -> None:
        """Take the worker's messages. Where that fails nobody listens to it any more: it is lost, and told to end."""
        try:
            while True:
                _identity, payload = await self._socket.recv_multipart()
                self._take(decode_from_worker(payload), ready, progress)
        except Exception as error:
            log.exception("the engine's messages are read no further")
            self.lost(EngineDead(f"the engine's messages cannot be read: {type(error).__name__}: {error}"))
            self._send(Stop())

    async def _watch_for_silence(self, seconds: float) -> None:
        """Give the engine up when it has requests and says nothing for so long."""
        silent = 0
        while self._dead is None:
            self._heard = False
            await asyncio.sleep(seconds / PATIENCE)
            silent = 0 if self._heard or not self._streams else silent + 1
            if silent == PATIENCE:
                log.error("the engine is given up: it has requests and ended no step for %g s", seconds)
                self.hung(EngineDead(f"the engine ended no step for {seconds:g} s (--step-timeout)"))

    def _take(self, message: FromWorker, ready: "asyncio.Future[None]", progress: Progress | None) -> None:
        match message:
            case Stepped(deltas, stats):
                self._heard |= bool(deltas) or stats.steps_total != self._stats.steps_total
                self._stats = stats
                if self._observer is not None:
                    self._observer(stats)
                for delta in deltas:
                    stream = self._streams.get(delta.request)
                    if stream is not None:
                        stream.put(delta)
            case Hello():
                self._send(Start(self._config, self._sharers))
            case Loading(phase, done):
                if progress is not None:
                    progress(phase, done)
            case Ready(info):
                self._info = info
                if not ready.done():
                    ready.set_result(None)
            case Failed(error, expected):
                # While it starts, the reason is the user's to mend; later on, its requests may go to another worker.
                mend = expected and not ready.done()
                self.lost(HeadraceError(error) if mend else EngineDead(f"the engine failed: {error}"))
