"""Public traces of LLM services: the Azure CSV and the Mooncake JSONL formats.

Traces hold lengths, not texts. Prompts are synthesised with the right number of tokens; Mooncake's hash ids name blocks
of 512 tokens, so equal ids become equal blocks and prefixes are shared as they were.
"""

import csv
import json
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from headrace.core.errors import ConfigError

MOONCAKE_BLOCK = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceEntry:
    """One request of a trace.

    Attributes:
        time: seconds since the first request; None where the trace has no times.
        prompt_tokens: length of the prompt.
        output_tokens: length of the answer.
        blocks: hash ids of the prompt's 512-token blocks; empty where the trace has none.
    """

    time: float | None
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, limit: int = 0) -> list[TraceEntry]:
    """Read a trace, the format told by its first line; entries without tokens in or out are left out.

    Args:
        path: an Azure CSV or a Mooncake JSONL file.
        limit: at most this many entries; 0: all.

    Raises:
        ConfigError: the file cannot be read or is in another format.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            first = lines.readline()
            lines.seek(0)
            if first.lstrip().startswith("{"):
                entries = [_mooncake(line, path, n) for n, line in enumerate(lines, 1) if line.strip()]
            elif first.strip().split(",") == list(_AZURE_COLUMNS):
                entries = [_azure(row, path, n) for n, row in enumerate(csv.DictReader(lines), 2)]
            else:
                raise ConfigError(f"{path} is neither an Azure CSV ({','.join(_AZURE_COLUMNS)}) nor Mooncake JSONL")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    entries = [entry for entry in entries if entry.prompt_tokens > 0 and entry.output_tokens > 0]
    entries = entries[: limit or None]
    if not entries:
        raise ConfigError(f"{path} holds no request")
    start = entries[0].time
    if start is None:
        return entries
    return [
        TraceEntry((entry.time or 0.0) - start, entry.prompt_tokens, entry.output_tokens, entry.blocks)
        for entry in entries
    ]


def _azure(row: dict[str, str | None], path: Path, number: int) -> TraceEntry:
    stamp = row["TIMESTAMP"] or ""
    try:
        # Seven digits of a second; Python reads six.
        time = datetime.fromisoformat(stamp[:26]).timestamp() if stamp[:1].isdigit() else None
        return TraceEntry(time, int(row["ContextTokens"] or ""), int(row["GeneratedTokens"] or ""))
    except ValueError as error:
        raise ConfigError(f"{path} line {number}: {error}") from error


def _mooncake(line: str, path: Path, number: int) -> TraceEntry:
    try:
        entry = json.loads(line)
        blocks = tuple(int(block) for block in entry["hash_ids"])
        length = int(entry["input_length"])
        if len(blocks) * MOONCAKE_BLOCK < length:
            raise ValueError(f"{len(blocks)} hash ids for {length} tokens")
        return TraceEntry(float(entry["timestamp"]) / 1000, length, int(entry["output_length"]), blocks)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} line {number} is not a Mooncake entry: {error}") from error


def synthesise(entries: list[TraceEntry], vocabulary: int, seed: int = 0, max_prompt: int = 0) -> list[list[int]]:
    """Prompts with the lengths of a trace and, where it has block ids, its shared prefixes.

    Args:
        entries: what `read_trace` gave.
        vocabulary: token ids are random in 100 .. vocabulary-1 (below 100 are often special tokens).
        seed: of the token ids.
        max_prompt: cut longer prompts to this many tokens; 0: never.
    """
    if vocabulary <= 100:
        raise ConfigError(f"--vocab-size must be above 100, got {vocabulary}")
    prompts = []
    for number, entry in enumerate(entries):
        length = min(entry.prompt_tokens, max_prompt or entry.prompt_tokens)
        if entry.blocks:
            needed = entry.blocks[: -(-length // MOONCAKE_BLOCK)]
            tokens = [t for block in needed for t in _random_tokens(f"{seed}/b{block}", MOONCAKE_BLOCK, vocabulary)]
        else:
            tokens = _random_tokens(f"{seed}/r{number}", length, vocabulary)
        prompts.append(tokens[:length])
    return prompts


def _random_tokens(key: str, count: int, vocabulary: int) -> list[int]:
    stream = random.Random(key)
    return [stream.randrange(100, vocabulary) for _ in range(count)]
