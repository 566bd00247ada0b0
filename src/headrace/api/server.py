"""`headrace serve`: the engine, the HTTP server over it, and an orderly end of both."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from headrace.api import logs
from headrace.api.app import create_app, make_state
from headrace.api.batch_service import BatchService
from headrace.api.http_protocol import BoundedHttpProtocol
from headrace.api.startup import StartProgress, start_engine
from headrace.api.state import ServerState
from headrace.core.config import Config, ServerConfig, check
from headrace.core.errors import ConfigError, EngineDead

log = logging.getLogger("headrace.api")

WATCH_S = 0.5
LAST_S = 5  # after a drain's end, for error events to reach their clients
KEEP_ALIVE_S = 75
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; returns once running requests are done and the engine has ended.

    Raises:
        ConfigError: the address cannot be listened on, or a file is missing (found out before the model is loaded).
        HeadraceError: the engine cannot start.
        EngineDead: the engine ended while serving.
    """
    logs.configure(config.server.log_level)
    check(config.engine)
    template = config.server.chat_template
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"--chat-template names {template}, which is not a file")
    with bind(config.server) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, listener))
    _say("stopped")


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address, not yet listening.

    Raises:
        ConfigError: the address is taken, or not ours, or no port.
    """
    if config.port > 65535:  # getaddrinfo would keep the low 16 bits
        raise ConfigError(f"port {config.port} is above 65535; choose another --port")
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}; choose another --host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {reason}; choose another --port or --host"
        ) from None
    return listener


async def _serve(config: Config, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    interrupt = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupt.set)
    progress = StartProgress(config.engine.model.model)
    with progress:
        starting = asyncio.create_task(start_engine(config, progress))
        stopped = asyncio.create_task(interrupt.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        generator = starting.result()
    progress.ready()
    try:
        state = make_state(generator, config.server, config.engine)
        batches = BatchService(state)
        server = _Server(state, batches, lambda: _announce(state, listener))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.interrupt)
        if interrupt.is_set():
            return
        watching = asyncio.create_task(_watch(state, server))
        await batches.resume()
        try:
            await server.serve(sockets=[listener])
        except OSError as error:  # somebody else began to listen while the model loaded
            raise ConfigError(f"cannot listen on port {config.server.port}: {error.strerror}") from None
        finally:
            watching.cancel()
            await batches.close()
        if state.dead is not None:
            raise state.dead
    finally:
        stopped.cancel()
        try:
            await generator.client.close()
        except Exception as error:  # it has ended before us; what we came to say must not be lost over that
            log.warning("the engine did not end in order", extra={"reason": f"{type(error).__name__}: {error}"})


class _Server(uvicorn.Server):
    """uvicorn's server with our signals: they are not raised again after a clean end.

    Args:
        state: of the app; tells what is in flight.
        batches: let go of their job at the first signal.
        announce: called once it listens.
    """

    def __init__(self, state: ServerState, batches: BatchService, announce: Callable[[], None]) -> None:
        super().__init__(_uvicorn_config(state, batches))
        self._state = state
        self._batches = batches
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by the event loop (`interrupt`)."""
        yield

    def interrupt(self) -> None:
        """The first signal drains, the second ends at once; the terminal is told which."""
        if self.should_exit:
            self.force_exit = True
            self._state.end_all("the server is shutting down")
        elif count := len(self._state.active):
            limit = self._state.config.drain_timeout
            _say(f"finishing {count} request{'s' * (count > 1)} (up to {limit:g} s); press Ctrl-C again to stop now")
        self._batches.stop()
        self.should_exit = True


async def _watch(state: ServerState, server: _Server) -> None:
    """End when the engine has died; end a drain that takes too long."""
    loop = asyncio.get_running_loop()
    drain_from: float | None = None
    while True:
        due = loop.time() + WATCH_S
        await asyncio.sleep(WATCH_S)
        state.metrics.loop_lag = max(0.0, loop.time() - due)
        try:
            await state.stats()
        except EngineDead as error:
            if not server.should_exit:
                log.error("the engine has ended; the server ends too", extra={"reason": str(error)})
            server.should_exit = True
        if server.should_exit:
            if drain_from is None:
                drain_from = loop.time()
                log.info("draining", extra={"requests": len(state.active)})
            if loop.time() - drain_from >= state.config.drain_timeout:
                state.end_all("the server is shutting down")


def _uvicorn_config(state: ServerState, batches: BatchService) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state, batches),
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=4 * state.config.max_connections + 64,  # idle ones included; the app refuses earlier
        timeout_graceful_shutdown=math.ceil(state.config.drain_timeout) + LAST_S,
    )


def _announce(state: ServerState, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    info = state.info
    key = " -H 'Authorization: Bearer KEY'" if state.config.api_key is not None else ""
    url = f"http://{host}:{port}"
    if info.store:
        _say(f"KV store: {info.store} (--no-store turns it off)")
    sys.stdout.write(
        f"Headrace serves {state.model} ({info.dtype} on {info.device}, context {info.max_model_len}) at {url}\n"
        f"Try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        '-d \'{"model": "default", "messages": [{"role": "user", "content": "Hello!"}]}\'\n'
    )
    sys.stdout.flush()
    if state.config.host not in LOOPBACK and state.config.api_key is None:
        log.warning("anyone who reaches this address may use the server: set --api-key")


def _say(text: str) -> None:
    """One plain line for whoever watches the terminal."""
    sys.stderr.write(f"headrace: {text}\n")
    sys.stderr.flush()


def _loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return None
    factory: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return factory
