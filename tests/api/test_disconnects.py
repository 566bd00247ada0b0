"""Clients that leave: whatever they were waiting for stops, and nothing of it stays (case 15)."""

import asyncio
import json
import random
import socket
from typing import Any

import httpx
import pytest
from served import Served, serve_parrot

from headrace.api import running

ENDLESS: dict[str, Any] = {"model": "parrot", "prompt": "abc", "max_tokens": 4000, "ignore_eos": True}


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_stops_the_work(stream: bool, n: int, caplog: pytest.LogCaptureFixture) -> None:
    with serve_parrot(step=0.005) as served:
        with connect(served) as raw:
            raw.sendall(request_bytes({**ENDLESS, "stream": stream, "n": n}))
            served.wait(lambda: served.engine.tokens > 5)
        served.idle()
        assert served.engine.tokens < 400
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_queue(stream: bool) -> None:
    with serve_parrot(step=0.005, max_running=1) as served:
        with connect(served) as first:
            first.sendall(request_bytes({**ENDLESS, "stream": True}))
            served.wait(lambda: served.engine.tokens > 2)
            with connect(served) as second:
                second.sendall(request_bytes({**ENDLESS, "stream": stream, "prompt": ["x", "y"]}))
                served.wait(lambda: len(served.engine.tasks) == 3)
            served.wait(lambda: len(served.engine.tasks) == 1)
        served.idle()


def test_leaving_before_the_body_is_complete(server: Served) -> None:
    with connect(server) as raw:
        raw.sendall(request_bytes(ENDLESS)[:-20])
    server.idle()
    with server.http() as http:
        assert http.get("/health").status_code == 200


def test_all_clients_leave_at_once() -> None:
    with serve_parrot(step=0.002, max_running=20) as served:
        sockets = [connect(served) for _ in range(60)]
        for i, raw in enumerate(sockets):
            raw.sendall(request_bytes({**ENDLESS, "stream": i % 2 == 0}))
        served.wait(lambda: len(served.engine.tasks) == 60)
        for raw in sockets:
            raw.close()
        served.idle()


def test_200_requests_with_random_aborts_leave_nothing() -> None:
    async def one(client: httpx.AsyncClient, dice: random.Random) -> None:
        body = {
            **ENDLESS,
            "stream": dice.random() < 0.5,
            "n": dice.choice([1, 1, 2]),
            "max_tokens": dice.randint(1, 60),
        }
        path = "/v1/completions"
        if dice.random() < 0.3:
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": "[[" + "word " * 30 + "]]"}]
            path = "/v1/chat/completions"
        try:
            async with asyncio.timeout(dice.choice([0.001, 0.01, 0.05, 0.2, 20])):
                response = await client.post(path, json=body)
                assert response.status_code == 200
        except TimeoutError:
            pass  # the client has left

    async def everyone(url: str) -> None:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits) as client:
            await asyncio.gather(*(one(client, random.Random(i)) for i in range(200)))

    with serve_parrot(step=0.002, max_running=16) as served:
        asyncio.run(everyone(served.url))
        served.idle()
        tasks = served.call(lambda: [t for t in asyncio.all_tasks(served.loop) if "headrace" in repr(t.get_coro())])
        assert tasks == []


def test_a_client_that_reads_nothing_holds_up_nobody(server: Served) -> None:
    with connect(server) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        before = server.engine.tokens
        raw.sendall(request_bytes({**ENDLESS, "stream": True, "n": 10, "max_tokens": 2000, "logprobs": 5}))
        # The engine is done with it although nothing was read, and others are served meanwhile.
        server.wait(lambda: server.engine.tokens >= before + 10 * 2000 and not server.engine.tasks, 30)
        (mailbox,) = server.call(lambda: list(server.state.active))
        assert mailbox.writing_since > 0
        with server.http() as http:
            assert http.post("/v1/completions", json={"prompt": "[[a]]"}).json()["choices"][0]["text"] == "a"


def test_a_slow_client_gets_everything_in_fewer_events() -> None:
    with serve_parrot() as served, connect(served) as raw:
        raw.sendall(request_bytes({**ENDLESS, "stream": True, "n": 10, "max_tokens": 2000, "logprobs": 0}))
        served.wait(lambda: served.engine.tokens == 10 * 2000, 30)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += raw.recv(1 << 20)
    events = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    texts = [""] * 10
    tokens = 0
    for event in events:
        choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
        texts[choice["index"]] += choice["text"]
        tokens += len((choice["logprobs"] or {"tokens": []})["tokens"])
    assert [len(text) for text in texts] == [2000] * 10
    assert tokens == 10 * 2000
    assert len(events) < 10 * 2000


def test_a_waiting_stream_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TICK_S", 0.05)
    with serve_parrot(step=0.01, max_running=1) as served, served.http() as http:
        with connect(served) as first:
            first.sendall(request_bytes({**ENDLESS, "stream": True}))
            served.wait(lambda: served.engine.tokens > 2)
            with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True, "max_tokens": 2}) as second:
                assert second.status_code == 200  # before it has a token: the first one still runs
                lines = second.iter_lines()
                assert next(lines) == ": keep-alive"
                first.close()
                rest = [line for line in lines if line.startswith("data")]
        assert len(rest) == 3
        assert rest[-1] == "data: [DONE]"


def test_a_client_that_never_reads_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TICK_S", 0.05)
    monkeypatch.setattr(running, "STALL_S", 0.3)
    with serve_parrot() as served, connect(served) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(request_bytes({**ENDLESS, "stream": True, "n": 10, "max_tokens": 2000, "logprobs": 5}))
        served.wait(lambda: served.engine.tokens > 0)
        served.idle()  # although the client is still connected
        with served.http() as http:
            assert http.get("/health").status_code == 200
