"""A real uvicorn server over the parrot, in a thread of its own."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from openai import OpenAI
from parrot import Parrot
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from headrace.api.app import create_app, make_state
from headrace.api.batch_service import BatchService
from headrace.api.http_protocol import BoundedHttpProtocol
from headrace.api.state import ServerState
from headrace.core.config import ServerConfig
from headrace.core.sampling import SamplingParams
from headrace.front.generator import Generator
from headrace.front.tokenizer import Tokenizer

T = TypeVar("T")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n' + ('' if closed else '<think>\\n')")


def byte_tokenizer(template: str = CHATML) -> Tokenizer:
    """One token per byte (`chr(33 + i)`-like letters first), and ChatML's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer(fast, {"eos_token": "<|im_end|>"}, {"default": template})


class Clock:
    """The time of day, for batches; `skip` lets it jump."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def time(self) -> float:
        return time.time() + self._ahead

    def skip(self, seconds: float) -> None:
        self._ahead += seconds


@dataclass
class Served:
    """A running server and what lies behind it; `call` runs something on its loop."""

    url: str
    engine: Parrot
    state: ServerState
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop
    clock: "Clock"

    def call(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(work()))
        return done.result(10)

    def wait(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Until the condition holds, looked at on the server's loop after each of its turns."""
        done: Future[None] = Future()

        def look() -> None:
            if done.cancelled():
                return
            if condition():
                done.set_result(None)
            else:
                self.loop.call_later(0.002, look)

        self.loop.call_soon_threadsafe(look)
        try:
            done.result(seconds)
        finally:
            done.cancel()

    def idle(self) -> None:
        """Nothing is left of any request."""
        self.wait(lambda: not (self.engine.tasks or self.engine.streams or self.state.active))

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=20, **options)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)


def parrot_state(
    config: ServerConfig | None = None,
    template: str = CHATML,
    defaults: SamplingParams | None = None,
    home: Path | None = None,
    clock: Callable[[], float] = time.time,
    **engine_options: Any,
) -> tuple[Parrot, ServerState]:
    """A parrot and what routes share over it; made on the loop it belongs to."""
    tokenizer = byte_tokenizer(template)
    brackets = (tokenizer.encode("[["), tokenizer.encode("]]"))
    letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz ")
    eos = tokenizer.token_id("<|im_end|>")
    assert eos is not None
    engine = Parrot(tokenizer.vocab_size, eos, brackets, letters, **engine_options)
    generator = Generator(engine, tokenizer, defaults)
    return engine, make_state(generator, config or ServerConfig(), home=home, clock=clock)


@contextlib.contextmanager
def serve_parrot(config: ServerConfig | None = None, **options: Any) -> Iterator[Served]:
    """A server on a free port; on leaving it is checked that nothing is left behind."""
    listener = socket.create_server(("127.0.0.1", 0))
    clock = Clock()
    ready: Future[tuple[Parrot, ServerState, BatchService, asyncio.AbstractEventLoop, uvicorn.Server]] = Future()

    async def run() -> None:
        engine, state = parrot_state(config, clock=clock.time, **options)
        batches = BatchService(state, clock.time)
        await batches.resume()
        settings = uvicorn.Config(
            create_app(state, batches), log_config=None, lifespan="off", http=BoundedHttpProtocol, ws="none"
        )
        server = uvicorn.Server(settings)
        ready.set_result((engine, state, batches, asyncio.get_running_loop(), server))
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    engine, state, batches, loop, server = ready.result(20)
    served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, state, state.tokenizer, loop, clock)
    served.wait(lambda: server.started)
    try:
        yield served
        asyncio.run_coroutine_threadsafe(batches.close(), loop).result(20)  # as a server does when it is told to end
        served.idle()
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()
