"""`headrace plan` understands a file as `headrace batch run` does: which lines are wrong, why, limits and groups."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import tiny_chat_model
from cli_runs import headrace

from headrace.cli.plan_endpoint import PlanEndpoint
from headrace.offline.jobs.folder import list_jobs
from headrace.offline.jobs.journal import FAILED
from headrace.offline.model_limits import model_limits
from headrace.offline.plan_input import PlanInput, read_plan_input
from homes import fresh_home

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KV_TOKENS = 1 << 20
ENDS = {"logit_bias": {"2": 100.0}}  # so that answers without a limit are short


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model.make(tmp_path_factory.mktemp("models") / "tiny")


def completion(prompt: Any, **body: Any) -> dict[str, Any]:
    return {"method": "POST", "url": COMPLETIONS, "body": {"model": "default", "prompt": prompt, **body}}


def chat(*messages: tuple[str, Any], **body: Any) -> dict[str, Any]:
    said = [{"role": role, "content": content} for role, content in messages]
    return {"method": "POST", "url": CHAT, "body": {"model": "default", "messages": said, **body}}


FOX = "The quick brown fox"
TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}}}
GOOD: dict[str, dict[str, Any]] = {
    "ids": completion([5, 6, 7], max_tokens=4),
    "alike": completion([8, 9], max_tokens=5, temperature=0.5),
    "sequences": completion([5, 6, 7], max_tokens=4, n=3),
    "text": completion(FOX, max_tokens=4),
    "texts": completion([FOX, "over the dog", FOX], max_tokens=2),
    "id lists": completion([[5, 6], [7, 8, 9]], max_tokens=3, n=2),
    "no limit": completion([5, 6, 7]),
    "null": completion(FOX, max_tokens=None, **ENDS),
    "echo": completion(FOX, max_tokens=0, echo=True),
    "name": completion([5, 6], max_tokens=4) | {"body": {"model": "tiny", "prompt": [5, 6], "max_tokens": 4}},
    "no name": {"method": "POST", "url": COMPLETIONS, "body": {"prompt": [5, 6], "max_tokens": 4}},
    "chat": chat(("user", FOX), **ENDS),
    "both limits": chat(("user", FOX), max_tokens=3, max_completion_tokens=6),
    "system": chat(("system", "Be kind."), ("user", FOX), max_tokens=8),
    "two systems": chat(("system", "Be kind."), ("user", FOX), ("developer", "Be short."), max_tokens=8),
    "two others": chat(("system", "Be kind."), ("user", "The dog"), ("developer", "Be long."), max_tokens=8),
    "parts": chat(("system", [{"type": "text", "text": "Be kind."}]), ("user", FOX), max_tokens=8),
    "tools": chat(("user", FOX), max_tokens=8, tools=[TOOL]),
    "choice": completion(FOX, max_tokens=8, guided_choice=["fox", "dog"]),
}
WRONG: dict[str, dict[str, Any]] = {
    "empty": completion(""),
    "empty list": completion([]),
    "mixed": completion([5, "text"]),
    "long": completion(list(range(5, 505)) * 10, max_tokens=4),
    "long text": completion(FOX * 2000, max_tokens=4),
    "limit": completion([5, 6], max_tokens=100_000),
    "no tokens": completion([5, 6], max_tokens=0),
    "vocabulary": completion([5, 512], max_tokens=4),
    "negative": completion([5, -1], max_tokens=4),
    "n": completion([5, 6], max_tokens=4, n=0),
    "many": completion([5, 6], max_tokens=4, n=129),
    "many texts": completion([FOX] * 1025),
    "hot": completion([5, 6], temperature=1000.0),
    "warm": completion([5, 6], temperature="warm"),
    "stream": completion([5, 6], stream=True),
    "best": completion([5, 6], best_of=3),
    "model": completion([5, 6]) | {"body": {"model": "gpt-4o", "prompt": [5, 6]}},
    "role": chat(("wizard", FOX)),
    "no messages": chat(),
    "long chat": chat(("user", FOX * 2000), max_tokens=4),
    "chat limit": chat(("user", FOX), max_completion_tokens=0),
    "tier": completion([5, 6], max_tokens=4, service_tier="x"),
    "salt": completion([5, 6], max_tokens=4, cache_salt="s" * 1025),
    "priority": completion([5, 6], max_tokens=4, priority=1 << 40),
    "get": completion([5, 6]) | {"method": "GET"},
    "no method": {"url": COMPLETIONS, "body": {"prompt": [5, 6]}},
    "no url": {"method": "POST", "body": {"prompt": [5, 6]}},
    "embeddings": completion([5, 6]) | {"url": "/v1/embeddings"},
    "no body": {"method": "POST", "url": COMPLETIONS},
    "x" * 513: completion([5, 6]),
    "": completion([5, 6]),
}


def odd_lines() -> list[bytes]:
    lines = [json.dumps({"custom_id": name, **line}).encode() for name, line in {**GOOD, **WRONG}.items()]
    lines += [json.dumps({"custom_id": name, **completion([5, 6])}).encode() for name in ("ids", "get", "limit")]
    lines += [b"nonsense", b"[1]", b"\xff{}", b'{"custom_id": 7}', b'{"body": {}}', b"  "]
    deep = json.dumps({"custom_id": "deep", **completion("DEEP")}).encode()
    lines += [deep.replace(b'"DEEP"', b"[" * 100_000 + b"]" * 100_000)]
    lines += [deep.replace(b'"DEEP"', b'"\\ud800"').replace(b"deep", b"surrogate")]
    noted = json.dumps({"custom_id": "noted", "note": "NOTE", **completion([5, 6])}).encode()
    lines += [noted.replace(b"NOTE", b"\xff")]
    return lines


def planned(path: Path, model: Path) -> PlanInput:
    limits = model_limits(model, "tiny", KV_TOKENS, KV_TOKENS)
    return read_plan_input(path, lambda: PlanEndpoint(lambda: model, "tiny", limits), limits=limits)


def alike(kinds: dict[int, int]) -> set[frozenset[int]]:
    """Sets of lines with the same kind."""
    found = defaultdict(set)
    for line, kind in kinds.items():
        found[kind].add(line)
    return {frozenset(lines) for lines in found.values()}


def test_a_file_is_planned_as_it_is_run(tmp_path: Path, model: Path) -> None:
    home, source, out = fresh_home(tmp_path / "home"), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(odd_lines()) + b"\n")
    engine = ("--threads", "1", "--kv-memory", "16MiB", "--no-store")
    done = headrace("batch", "run", str(source), "-o", str(out), "--model", str(model), *engine, home=home)
    assert done.returncode == 0, done.stderr
    given = planned(source, model)

    refused = {}
    for row in map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines()):
        error = row["error"] or row["response"]["body"]["error"]
        number = row["line"] if row["error"] is None else error["line"]
        refused[number] = (row["custom_id"] or None, error["code"], error["message"], error["param"])
    told = {error.line: (error.custom_id or None, error.code, error.message, error.param) for error in given.errors}
    assert told == refused
    assert given.wrong == len(refused) == len(odd_lines()) - len(GOOD) - 1

    assert given.ids == list(GOOD)
    (job,) = list_jobs(home / "jobs")
    journal = job.journal()
    rows = {number: journal.line(number) for number in range(1, len(GOOD) + 1)}
    journal.close()
    assert not any(row.state == FAILED and row.number not in refused for row in rows.values())
    assert given.requests.prompt_lengths.tolist() == [row.prompt for row in rows.values()]
    assert given.requests.max_tokens.tolist() == [row.most for row in rows.values()]
    assert alike(dict(enumerate(given.requests.groups.tolist(), 1))) == alike({n: row.kind for n, row in rows.items()})


def test_lines_count_as_what_they_ask_for(tmp_path: Path, model: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(odd_lines()))
    given = planned(source, model)
    prompts = dict(zip(given.ids, given.requests.prompt_lengths.tolist()))
    most = dict(zip(given.ids, given.requests.max_tokens.tolist()))
    groups = dict(zip(given.ids, given.requests.groups.tolist()))
    assert (most["ids"], most["sequences"], most["texts"], most["id lists"]) == (4, 12, 6, 12)
    assert (most["no limit"], most["chat"], most["both limits"]) == (16, 4096 - prompts["chat"], 6)
    assert (prompts["id lists"], prompts["texts"] > 2 * prompts["text"]) == (5, True)
    assert groups["ids"] == groups["alike"] != groups["no limit"]
    assert len({groups[name] for name in ("system", "two systems", "two others", "parts")}) == 4
    assert given.names[groups["alike"]] == "completion, up to 6 tokens"
