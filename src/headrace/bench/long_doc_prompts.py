"""Windows of long documents and questions about each: from a LooGLE file, or random."""

import ast
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.workload import Item, Tokenizer, items
from headrace.core.errors import ConfigError

#: Tokens of a question at most, what is around it included.
QUESTION_TOKENS = 64


@dataclass(frozen=True)
class Window:
    """Part of a document, and questions that are asked behind it, as token ids."""

    tokens: list[int]
    questions: list[list[int]]


def read_windows(path: Path, tokenizer: Tokenizer, count: int, tokens: int, questions: int) -> list[Window]:
    """Windows of the same length, spread evenly over the documents of a file; those of one document may overlap.

    Args:
        path: JSONL as LooGLE has it: `input`, the text, and `qa_pairs`, a list of objects with `Q`, or its text.
        tokenizer: makes token ids.
        count: windows.
        tokens: of a window.
        questions: for each.

    Raises:
        ConfigError: the file cannot be read, a line is wrong, or there are too few long documents.
    """
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    documents = []
    for number, line in enumerate(lines, 1):
        try:
            text, asked = _document(json.loads(line))
        except (ValueError, SyntaxError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} line {number} is no document with `input` and `qa_pairs`: {error}") from error
        ids = list(tokenizer.encode(text))
        if len(ids) >= tokens:
            documents.append((ids, [tokenizer.encode(f"\n\nQuestion: {q}\nAnswer:")[-QUESTION_TOKENS:] for q in asked]))
    if not documents:
        raise ConfigError(f"{path} has no document of {tokens} tokens; give a smaller --window")
    windows = []
    for number, (ids, asked_ids) in enumerate(documents):
        share = count // len(documents) + (number < count % len(documents))
        step = (len(ids) - tokens) // max(1, share - 1)
        if share > 1 and not step:
            raise ConfigError(f"{path} has too little text for {count} windows of {tokens} tokens; give fewer")
        for place in range(share):
            chosen = [asked_ids[(place * questions + i) % len(asked_ids)] for i in range(questions)]
            windows.append(Window(ids[place * step : place * step + tokens], chosen))
    return windows


def random_windows(count: int, tokens: int, questions: int, vocab_size: int, seed: int = 0) -> list[Window]:
    """Windows of random token ids, the same for the same seed."""
    stream = random.Random(seed)
    return [
        Window(_random(stream, tokens, vocab_size), [_random(stream, 30, vocab_size) for _ in range(questions)])
        for _ in range(count)
    ]


def question_batch(windows: Sequence[Window], new: Sequence[list[int]], max_tokens: int) -> list[Item]:
    """Requests such that all windows come between two questions about the same one.

    Args:
        windows: of the documents.
        new: prompts that nobody has asked before, spread evenly among the questions.
        max_tokens: tokens of each answer.
    """
    prompts = [
        window.tokens + window.questions[number]
        for number in range(max(len(window.questions) for window in windows))
        for window in windows
        if number < len(window.questions)
    ]
    for number, prompt in enumerate(new):
        prompts.insert((number + 1) * len(prompts) // (len(new) + 1) + number, prompt)
    return items((prompt, max_tokens) for prompt in prompts)


def new_prompts(count: int, tokens: int, vocab_size: int, seed: str) -> list[list[int]]:
    """Random prompts; another seed gives others."""
    stream = random.Random(seed)
    return [_random(stream, tokens, vocab_size) for _ in range(count)]


def _random(stream: random.Random, count: int, vocab_size: int) -> list[int]:
    return [stream.randrange(min(100, vocab_size // 2), min(vocab_size, 40000)) for _ in range(count)]


def _document(found: dict[str, Any]) -> tuple[str, list[str]]:
    pairs = found["qa_pairs"]
    if isinstance(pairs, str):  # as the published files have it: the list as Python would print it
        pairs = ast.literal_eval(pairs)
    asked = [str(pair["Q"]) for pair in pairs]
    if not asked:
        raise ValueError("no question")
    return str(found["input"]), asked
