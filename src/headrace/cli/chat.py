"""`headrace chat`: a conversation in the terminal."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

import typer

from headrace.cli.options import with_settings
from headrace.core.config import Config, EngineConfig, ServerConfig
from headrace.core.errors import HeadraceError

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer"


@with_settings(EngineConfig)
def chat(
    engine: EngineConfig,
    url: Annotated[str | None, typer.Option(help="talk to this server; default: start one of our own")] = None,
    api_key: Annotated[str | None, typer.Option(help="key of that server")] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest word")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="longest answer in tokens")] = None,
) -> None:
    """Talk to a model; the answer appears as it is written."""
    with ExitStack() as stack:
        if url is not None and "://" not in url:
            url = f"http://{url}"
        if url is None:
            url = stack.enter_context(_own_server(engine))
            name = "default"
        else:
            name = engine.model.model
        body = {"model": name, "temperature": temperature, "max_tokens": max_tokens}
        asked = {key: value for key, value in body.items() if value is not None}
        Conversation(url.rstrip("/").removesuffix("/v1"), asked, api_key, system).run()


def _own_server(engine: EngineConfig) -> Any:
    from rich.console import Console

    from headrace.bench.server_process import free_port, running_server
    from headrace.cli.models import fetch

    fetch(engine.model.model, engine.model.revision)  # with a progress bar here, not silently in the child
    server = replace(ServerConfig(), port=free_port(), log_level="warning")
    console = Console(stderr=True)
    context = running_server(Config(engine, server))
    if not console.is_terminal:
        return context
    return _Announced(context, console)


class _Announced:
    """Shows a spinner while the server starts."""

    def __init__(self, context: Any, console: Any) -> None:
        self._context, self._console = context, console

    def __enter__(self) -> str:
        with self._console.status("loading the model"):
            url: str = self._context.__enter__()
        return url

    def __exit__(self, *error: Any) -> Any:
        return self._context.__exit__(*error)


class Conversation:
    """Reads lines, streams answers, remembers both."""

    def __init__(self, url: str, body: dict[str, Any], api_key: str | None, system: str | None) -> None:
        self._url, self._body, self._key = url, body, api_key
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._start)

    def run(self) -> None:
        """Talk until the input ends or the user leaves."""
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401 - line editing and history for input()

            # Started in the background of a shell without job control, Python would leave Ctrl-C ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print(HELP, file=sys.stderr)
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print(file=sys.stderr)  # at the prompt, Ctrl-C discards the line
                continue
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                self.messages = list(self._start)
            elif line.startswith("/"):
                print(f"unknown command {line.split()[0]}; {HELP}", file=sys.stderr)
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for text in self._stream():
                answer += text
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr)
        finally:
            print(flush=True)
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()  # a question without an answer would confuse the next turn

    def _stream(self) -> Iterator[str]:
        import httpx

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        body = {**self._body, "messages": self.messages, "stream": True}
        try:
            with (
                httpx.Client(trust_env=False, timeout=httpx.Timeout(None, connect=10)) as client,
                client.stream("POST", f"{self._url}/v1/chat/completions", json=body, headers=headers) as response,
            ):
                if response.status_code != 200:
                    response.read()
                    raise HeadraceError(f"the server answered {response.status_code}: {_message(response)}")
                for event in response.iter_lines():
                    if event.startswith("data:") and event[5:].strip() != "[DONE]":
                        yield from _texts(json.loads(event[5:]))
        except httpx.TransportError as error:
            raise HeadraceError(f"no answer from {self._url} ({type(error).__name__}); is the server there?") from error


def _texts(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise HeadraceError(f"the server failed: {event['error'].get('message', event['error'])}")
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        yield from filter(None, (delta.get("reasoning_content"), delta.get("content")))


def _message(response: Any) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(response.reason_phrase)
