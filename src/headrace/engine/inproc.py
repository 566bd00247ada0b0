"""The engine in the caller's process: for `headrace.LLM`, benches and tests."""

from collections.abc import AsyncIterator, Callable

from headrace.core.config import EngineConfig
from headrace.core.events import Delta, EngineInfo, EngineStats
from headrace.core.request import Request
from headrace.engine.build import Progress, build
from headrace.engine.core import Engine


class InProcessClient:
    """An `EngineClient` without a process in between.

    Synchronous use: `add`, `abort`, `poll` until `idle`. The asynchronous methods are the same engine for code written
    against `EngineClient`; a step then blocks the event loop, which a server must not have (it uses its own process).

    Args:
        config: of the engine.
        progress: told how far loading is.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self.engine = Engine(config, build(config, progress))
        self._streams: dict[str, list[Delta]] = {}

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        return self.engine.info

    @property
    def dead(self) -> None:
        """It lives as long as this process."""

    def add(self, request: Request) -> None:
        """Queue a request (see `Engine.add`)."""
        self.engine.add(request)

    def pace(self, tokens: int | None) -> None:
        """See `EngineClient.pace`."""
        self.engine.limit_offline(tokens)

    def abort(self, request_id: str) -> None:
        """End a request; its last delta comes with the next `poll`."""
        self.engine.abort(request_id)

    def poll(self, interrupt: Callable[[], bool] | None = None) -> list[Delta]:
        """Run one step and return what it brought."""
        return self.engine.step(interrupt)

    def idle(self) -> bool:
        """True when `poll` would do nothing."""
        return self.engine.idle

    def snapshot(self) -> EngineStats:
        """Counters now."""
        return self.engine.stats()

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """See `EngineClient.submit`."""
        self.engine.add(request)
        self._streams[request.id] = []
        return self._stream(request.id)

    async def _stream(self, request_id: str) -> AsyncIterator[Delta]:
        kept = self._streams[request_id]
        finished = False
        try:
            while not finished:
                while not kept:
                    for delta in self.poll():
                        stream = self._streams.get(delta.request)
                        if stream is not None:
                            stream.append(delta)
                delta = kept.pop(0)
                finished = delta.finish is not None
                yield delta
        finally:
            del self._streams[request_id]
            if not finished:
                self.engine.abort(request_id)

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        return self.snapshot()

    async def close(self) -> None:
        """End what is in flight and let go of the KV store."""
        for request_id in list(self._streams):
            self.engine.abort(request_id)
        self.engine.close()
