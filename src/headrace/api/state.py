"""What all routes of one server share."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from headrace.api.errors import ApiError, model_not_found
from headrace.api.file_store import FileStore
from headrace.api.mailbox import Mailbox
from headrace.api.metrics import Metrics
from headrace.api.token_text import TokenText
from headrace.core.client import EngineClient
from headrace.core.config import EngineConfig, ServerConfig
from headrace.core.errors import EngineDead
from headrace.core.events import EngineInfo, EngineStats
from headrace.front.generator import Generator
from headrace.front.tokenizer import Tokenizer

ALIAS = "default"


@dataclass(slots=True)
class ServerState:
    """The engine, its front and what is in flight.

    Attributes:
        client: the engine.
        generator: runs requests on it.
        tokenizer: of the model.
        config: of the server.
        texts: names tokens.
        model: the model's name in the API.
        metrics: what is counted.
        hermes: tool calls are parsed.
        think: reasoning is parsed.
        engine: what the engine was configured with.
        files: what clients uploaded and batches wrote.
        jobs: folder of the batches.
        active: mailboxes of the requests in flight, so that a drain can end them.
        dead: set once the engine is known to have ended.
    """

    client: EngineClient
    generator: Generator
    tokenizer: Tokenizer
    config: ServerConfig
    texts: TokenText
    model: str
    metrics: Metrics
    hermes: bool
    think: bool
    engine: EngineConfig
    files: FileStore
    jobs: Path
    created: int = field(default_factory=lambda: int(time.time()))
    active: set[Mailbox] = field(default_factory=set)
    dead: EngineDead | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        return self.client.info

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`."""
        return f"fp_{self.info.fingerprint[:12]}"

    def check_model(self, name: str | None) -> None:
        """Raise the 404 of a model that is not served; no name means the served one."""
        if name is not None and name not in (self.model, ALIAS):
            raise model_not_found(name, self.model)

    async def stats(self) -> EngineStats:
        """The engine's counters.

        Raises:
            EngineDead: it has ended.
        """
        if self.dead is None and (reason := self.client.dead) is not None:
            self.dead = EngineDead(str(reason))  # a client that knows it before a request fails
        if self.dead is not None:
            raise self.dead
        try:
            return await self.client.stats()
        except EngineDead as error:
            self.dead = error
            raise

    def end_all(self, reason: str) -> None:
        """End every request in flight with a 503."""
        for mailbox in list(self.active):
            mailbox.fail(ApiError(503, reason, "service_unavailable", code="shutting_down"))
