"""A worker process: one engine behind a ZeroMQ socket.

No Python thread runs beside the step loop (a busy one more than doubles a decode step): the socket is read between
steps, and between the layers of steps that are all offline.
"""

import ctypes
import logging
import os
import signal
import sys
import time

import zmq

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
    decode_to_worker,
    encode,
)
from headrace.core.errors import HeadraceError
from headrace.core.events import Delta, EngineStats
from headrace.core.request import Request
from headrace.engine.core import Engine

SEND_HIGH_WATER = 10_000
#: An idle worker looks this often whether its numbers have changed: the store goes on writing after the last step.
IDLE_MS = 1000
#: A worker whose steps bring nothing to tell (the parts of a long prompt) says this often that they end.
BEAT_SECONDS = 1.0
PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class Link:
    """The worker's end of the socket."""

    def __init__(self, address: str, identity: bytes) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def send(self, message: FromWorker) -> None:
        """Send, waiting for the front when it is very far behind."""
        self._socket.send(encode(message))

    def receive(self, wait_ms: int | None) -> ToWorker | None:
        """The next message; None when there is none within `wait_ms` (None: wait for ever)."""
        if not self._socket.poll(wait_ms):
            return None
        return decode_to_worker(self._socket.recv())

    def close(self) -> None:
        """Send what is pending and let go."""
        self._socket.close()
        self._context.term()


class StopWorker(Exception):
    """The front asked for the end."""


class Worker:
    """Feeds an engine from the link and reports steps: those that bring something, and otherwise one a second."""

    def __init__(self, link: Link, engine: Engine) -> None:
        self._link = link
        self._engine = engine
        self._refused: list[Delta] = []
        self._told: EngineStats | None = None
        self._told_at = 0.0

    def run(self) -> None:
        """Serve until `StopWorker`."""
        engine = self._engine
        while True:
            idle = engine.idle and not self._refused
            self._drain(wait=idle)
            deltas = engine.step(self._interrupt)
            if deltas or self._refused or (not idle and time.monotonic() - self._told_at > BEAT_SECONDS):
                deltas += self._refused
                self._refused = []
                self._report(deltas, engine.stats())
            elif idle and engine.idle:
                stats = engine.stats()
                if stats != self._told:
                    self._report([], stats)

    def _report(self, deltas: list[Delta], stats: EngineStats) -> None:
        self._told, self._told_at = stats, time.monotonic()
        self._link.send(Stepped(deltas, stats))

    def _interrupt(self) -> bool:
        """Between layers of an offline step: True once online work has arrived."""
        self._drain(wait=False)
        return self._engine.online_waiting

    def _drain(self, wait: bool) -> None:
        message = self._link.receive(IDLE_MS if wait else 0)
        while message is not None:
            self._handle(message)
            message = self._link.receive(0)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Submit(request):
                self._add(request)
            case Abort(requests):
                for request_id in requests:
                    self._engine.abort(request_id)
            case Pace(tokens):
                self._engine.limit_offline(tokens)
            case Stop():
                raise StopWorker
            case Start():
                raise HeadraceError("the worker is started already")

    def _add(self, request: Request) -> None:
        """Queue a request. One that the engine cannot even begin fails alone: passed on, it would end every worker."""
        try:
            self._engine.add(request)
        except HeadraceError as error:
            self._refused.append(Delta(request.id, [], "error", error=str(error)))
        except Exception:
            log.exception("request %s cannot be begun", request.id)
            said = "the engine failed on this request; the log says why"
            self._refused.append(Delta(request.id, [], "error", error=said))


def serve(address: str, identity: bytes) -> int:
    """Connect, load what the front says, serve. Returns the exit status."""
    link = Link(address, identity)
    try:
        link.send(Hello(os.getpid()))
        start = link.receive(None)
        if not isinstance(start, Start):
            return 0
        from headrace.engine.build import build

        parts = build(start.config, lambda phase, done: link.send(Loading(phase, done)), sharers=start.sharers)
        engine = Engine(start.config, parts)
        link.send(Ready(parts.info))
        try:
            Worker(link, engine).run()
        finally:
            engine.close()  # write what waits to be written, within a few seconds
    except StopWorker:
        return 0
    except HeadraceError as error:
        link.send(Failed(str(error), expected=True))
        return 1
    except Exception as error:
        link.send(Failed(f"{type(error).__name__}: {error}", expected=False))
        raise
    finally:
        link.close()
    return 0


def _die_with_parent() -> None:
    """Have the kernel end this process when the front dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """`python -m headrace.cluster.worker ADDRESS IDENTITY PARENT_PID [CPUS]`."""
    address, identity, parent, *cpus = sys.argv[1:]
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus[0].split(",")})
    _die_with_parent()
    if os.getppid() != int(parent):
        sys.exit(0)
    # They reach the whole group: the front drains, then says Stop; under nohup it lives on when its terminal closes.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    status = serve(address, identity.encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the link is closed; taking torch apart piece by piece takes seconds and frees nothing more


if __name__ == "__main__":
    main()
