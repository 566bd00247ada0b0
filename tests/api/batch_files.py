"""Batch inputs for the parrot, batches of them, and a folder that says what model it is."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types import Batch
from served import Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FINAL = ("completed", "failed", "expired", "cancelled")
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 258, "torch_dtype": "float32",
}  # fmt: skip


def model_folder(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def chat_line(custom_id: str, song: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Sing [[{song}]]"}]
    return {
        "custom_id": custom_id, "method": "POST", "url": CHAT,
        "body": {"model": "default", "messages": messages, **body},
    }  # fmt: skip


LINES = [chat_line(f"r{i}", f"song {i}") for i in range(400)]


def jsonl(*lines: Any) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def upload(client: OpenAI, content: bytes, name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, content), purpose="batch").id


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def start(client: OpenAI, content: bytes, **options: Any) -> Batch:
    options = {"endpoint": CHAT, "completion_window": "24h", **options}
    return client.batches.create(input_file_id=upload(client, content), **options)


def ended(client: OpenAI, batch: Batch, seconds: float = 30) -> Batch:
    deadline = time.monotonic() + seconds
    while batch.status not in FINAL and time.monotonic() < deadline:
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.status in FINAL
    return batch


def begun(client: OpenAI, batch: Batch, lines: int) -> Batch:
    """The batch once so many of its lines are answered."""
    while batch.request_counts is None or batch.request_counts.completed < lines:
        assert batch.status in ("validating", "in_progress")
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


@contextmanager
def stalled(served: Served, client: OpenAI, **options: Any) -> Iterator[Batch]:
    """A batch of `LINES` of which the engine answers some 20 and then no more."""
    served.engine.stall_after = 20
    try:
        yield begun(client, start(client, jsonl(*LINES), **options), 20)
    finally:
        served.engine.step, served.engine.stall_after = 0.0, None
