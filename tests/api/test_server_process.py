"""`headrace serve` as a process over a tiny model: answers, drains, and says why it cannot start."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_chat_model
from openai import OpenAI

from headrace.bench.server_process import free_port

PROMPT = "The quick brown fox"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model.make(tmp_path_factory.mktemp("tiny"))


class Process:
    """A server of our own in a session of its own; its output is collected by threads."""

    def __init__(self, model: Path | str, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        command = [sys.executable, "-m", "headrace.cli", "serve", str(model), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--kv-memory", "16MiB", "--threads", "1", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self.announced = threading.Event()
        self.speaking = threading.Event()
        self._readers = [threading.Thread(target=self._read_out), threading.Thread(target=self._read_err)]
        for reader in self._readers:
            reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0, timeout=60)

    def wait(self, seconds: float = 30) -> int:
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(10)
        return code

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out.append(line)
            if line.startswith("Try: curl"):
                self.announced.set()
        self.announced.set()

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.err.append(line)
            self.speaking.set()


@contextmanager
def started(model: Path, *flags: str) -> Iterator[Process]:
    server = Process(model, *flags)
    try:
        assert server.announced.wait(120)
        assert server.process.poll() is None, server.err
        yield server
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.wait()


def engine_pid(server: Process) -> int:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    workers = [pid for pid in children if b"headrace.cluster.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (worker,) = workers
    return int(worker)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Process]:
    with started(model, "--drain-timeout", "60s") as server:
        yield server


def test_announces_itself_with_a_curl_line(running: Process) -> None:
    assert running.url in running.out[0]
    command = re.search(r"-d '(.*)'$", running.out[1].strip())
    assert command is not None
    body = json.loads(command.group(1)) | {"max_tokens": 4}
    response = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200


def test_streamed_and_whole_greedy_answers_agree(running: Process) -> None:
    client = running.client()
    messages: Any = [{"role": "user", "content": PROMPT}]
    asked: Any = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_cold_warm_batched_and_alone_give_the_same_text(running: Process) -> None:
    client = running.client()
    prompts = [f"{i} {PROMPT} " * 6 for i in range(5)]
    asked: Any = {"model": "default", "temperature": 0, "max_tokens": 24}
    cold = [client.completions.create(prompt=p, **asked).choices[0].text for p in prompts]
    batched = [c.text for c in client.completions.create(prompt=prompts, **asked).choices]
    warm = [client.completions.create(prompt=p, **asked).choices[0].text for p in prompts]
    assert cold == batched == warm


def test_prompt_logprobs_of_a_continuation_are_those_it_was_made_with(running: Process) -> None:
    client = running.client()
    ids = httpx.post(f"{running.url}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    extra: Any = {"return_token_ids": True}
    made = client.completions.create(
        model="default", prompt=ids, max_tokens=12, temperature=0, logprobs=3, extra_body=extra
    )
    tokens = (made.choices[0].model_extra or {})["token_ids"]
    scored = client.completions.create(model="default", prompt=ids + tokens, max_tokens=0, echo=True, logprobs=3)
    assert made.choices[0].logprobs is not None
    assert scored.choices[0].logprobs is not None
    new, known = made.choices[0].logprobs, scored.choices[0].logprobs
    visible = len(new.tokens or [])
    assert visible >= 11
    assert (known.tokens or [])[len(ids) : len(ids) + visible] == new.tokens
    assert (known.token_logprobs or [])[len(ids) : len(ids) + visible] == pytest.approx(new.token_logprobs, abs=1e-4)


def test_forced_call_and_schema_through_the_grammar(running: Process) -> None:
    client = running.client()
    messages: Any = [{"role": "user", "content": "Pick one."}]
    named: Any = {"type": "function", "function": {"name": "pick"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(
            model="default", messages=messages, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
        )
        calls: Any = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert [c.function.name for c in calls] == ["pick"]
        assert json.loads(calls[0].function.arguments)["n"] in (1, 2, 3)
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    shape: Any = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {**schema, "additionalProperties": False}},
    }
    answer = client.chat.completions.create(model="default", messages=messages, response_format=shape, max_tokens=100)
    assert json.loads(answer.choices[0].message.content or "")["a"] in ("x", "yy")
    chosen: Any = {"guided_choice": ["yes", "no"]}
    answer = client.chat.completions.create(model="default", messages=messages, extra_body=chosen)
    assert answer.choices[0].message.content in ("yes", "no")


def test_a_wrong_grammar_is_refused(running: Process) -> None:
    body = {"prompt": "a", "guided_regex": "(("}
    response = httpx.post(f"{running.url}/v1/completions", json=body)
    assert response.status_code == 400
    assert "regex" in response.json()["error"]["message"]


def test_leaving_clients_free_the_engine(running: Process) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    for _ in range(5):
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
    deadline = time.monotonic() + 20
    used: list[str] = []
    while time.monotonic() < deadline:
        text = httpx.get(f"{running.url}/metrics").text
        used = re.findall(r"^headrace:(?:num_requests_running|kv_cache_usage_perc)\S* (\S+)$", text, re.M)
        if [float(value) for value in used] == [0, 0]:
            return
    raise AssertionError(f"pages or sequences are still held: {used}")


def test_a_taken_port_is_told_before_the_model_is_loaded(running: Process) -> None:
    second = Process("/no/such/model", port=running.port)
    assert second.wait() != 0
    (line,) = [line for line in second.err if line.strip()]
    assert str(running.port) in line
    assert "--port" in line


def test_a_model_that_is_not_there() -> None:
    server = Process("/no/such/model")
    assert server.wait(60) != 0
    assert "/no/such/model" in server.err[-1]
    assert "Traceback" not in "".join(server.err)
    assert server.out == []


def test_sigterm_while_the_model_loads(model: Path) -> None:
    server = Process(model)
    assert server.speaking.wait(60)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert server.out == []


def test_sigterm_finishes_what_runs(running: Process) -> None:
    """The last test of the shared server: it ends it."""
    body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": True}
    idle = httpx.Client(base_url=running.url)
    assert idle.get("/health").status_code == 200
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert running.wait() == 0
    plain = [line for line in running.err if line.startswith("headrace: ")]
    assert plain[-2:] == [
        "headrace: finishing 1 request (up to 60 s); press Ctrl-C again to stop now\n",
        "headrace: stopped\n",
    ]
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{running.url}/health")
    idle.close()


def test_a_second_signal_stops_at_once(model: Path) -> None:
    with started(model, "--drain-timeout", "600s") as server:
        body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": True, "n": 32}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            while not any("finishing 1 request" in line for line in server.err):
                next(lines)
            server.process.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx.TransportError):
                rest = [line for line in lines if line]
                assert "shutting_down" in rest[-2]
        assert server.wait() == 0
        assert server.err[-1] == "headrace: stopped\n"
        assert "Traceback" not in "".join(server.err)


def test_a_drain_has_an_end(model: Path) -> None:
    with started(model, "--drain-timeout", "0s") as server:
        body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": True, "n": 32}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert server.wait() == 0


def test_a_dead_engine_ends_the_server(model: Path) -> None:
    with started(model) as server:
        body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": True, "n": 16}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine_pid(server), signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert server.wait() == 1
        assert "Traceback" not in "".join(server.err)
        assert server.err[-1].startswith("headrace: error: the engine process ended")
