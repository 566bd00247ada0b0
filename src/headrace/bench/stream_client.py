"""One streamed request to any OpenAI-compatible server, timed."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from headrace.bench.latency_stats import Observed


@dataclass(frozen=True)
class Endpoint:
    """A server: its address without path, the model to ask for, and a key where it wants one."""

    url: str
    model: str = "default"
    api_key: str | None = None

    def client(self, timeout: float | None = None) -> httpx.AsyncClient:
        """A client without limits on connections, since an open loop must never wait for one."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        wait = httpx.Timeout(timeout, connect=30)
        return httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=wait, trust_env=False)


async def stream(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    due: float,
    on_text: Callable[[str], None] | None = None,
) -> Observed:
    """Send a request and read its stream to the end; errors are recorded, not raised.

    Args:
        client: of the server.
        path: `/v1/completions` or `/v1/chat/completions`.
        body: the request; streaming and its usage are switched on here.
        due: when it should be sent, on `time.perf_counter`'s clock.
        on_text: called with each piece of output.
    """
    seen = Observed(due=due, sent=time.perf_counter())
    full = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", path, json=full) as response:
            if response.status_code != 200:
                await response.aread()
                seen.error = f"{response.status_code} {_message(response)}"
            else:
                async for line in response.aiter_lines():
                    _take(line, seen, on_text)
    except httpx.HTTPError as error:
        seen.error = type(error).__name__ + (f": {error}" if str(error) else "")
    seen.end = time.perf_counter()
    if not seen.output_tokens:
        seen.output_tokens = len(seen.arrivals)  # a server without usage: a token a piece is the best guess
    return seen


def _take(line: str, seen: Observed, on_text: Callable[[str], None] | None) -> None:
    if not line.startswith("data:"):
        return
    data = line[5:].strip()
    if data == "[DONE]":
        return
    try:
        event = json.loads(data)
    except ValueError:
        seen.error = "the stream held an event that is not JSON"
        return
    if error := event.get("error"):
        seen.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return
    if usage := event.get("usage"):
        seen.prompt_tokens = usage.get("prompt_tokens") or 0
        seen.output_tokens = usage.get("completion_tokens") or 0
        seen.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices") or []:
        text, piece = _piece(choice)
        if piece:
            seen.arrivals.append(time.perf_counter())
            seen.text += text
            if on_text is not None:
                on_text(text)


def _piece(choice: dict[str, Any]) -> tuple[str, bool]:
    """The text of a choice, and whether it counts as output (a chunk with only a role does not).

    Where token ids were asked for (`return_token_ids`), a token that shows no text yet counts too.
    """
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
        return text, bool(text or choice.get("token_ids"))
    text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
    return text, bool(text or delta.get("tool_calls") or choice.get("token_ids"))


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase
