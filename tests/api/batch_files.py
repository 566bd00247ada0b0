"""Batch inputs for the parrot, and a folder that says what model it is."""

import json
from pathlib import Path
from typing import Any

from openai import OpenAI

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
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


def jsonl(*lines: Any) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def upload(client: OpenAI, content: bytes, name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, content), purpose="batch").id


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
