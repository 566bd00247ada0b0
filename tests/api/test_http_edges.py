"""Keys, limits, unknown routes and malformed bodies over raw HTTP."""

import contextlib
import json
import socket
from typing import Any

import httpx
import pytest
from served import Served, serve_parrot

from headrace.api import http_protocol, limits
from headrace.core.config import ServerConfig

CHAT = {"model": "parrot", "messages": [{"role": "user", "content": "[[ok]]"}]}
LONG: dict[str, Any] = {"model": "parrot", "prompt": "abc", "max_tokens": 4000, "ignore_eos": True}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'"text"',
        b'{"messages": [], "messages"',
        b'{"model": "parrot", "prompt": NaN}',
        b'{"model": "parrot", "prompt": "a", "temperature": NaN}',
        b'{"model": "parrot", "prompt": "a", "temperature": Infinity}',
        b'{"model": "parrot", "prompt": "a", "temperature": 1e999}',
        b'{"model": "parrot", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "parrot", "prompt": "a", "max_tokens": ' + b"9" * 30 + b"}",
        b'{"model": "parrot", "prompt": "\\ud800"}',
        b'{"model": "parrot", "prompt": "\xff\xfe"}',
        b'{"model": "parrot", "prompt": "a", "max_tokens": 1, "\xff": 1}',
        b'{"model": "parrot", "prompt": "a", "zz": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "parrot", "prompt": "a", "guided_json": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
        b'{"model": "parrot", "prompt": "a", "guided_json": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
        b"\xef\xbb\xbf{}",
        b"\x00",
    ],
)
def test_malformed_bodies(server: Served, body: bytes) -> None:
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = http.post(path, content=body, headers={"content-type": "application/json"})
            # Tokenising ignores fields that it does not know, whatever they hold.
            if not (path == "/tokenize" and response.status_code == 200 and body.startswith(b'{"model": "parrot"')):
                error_of(response, 400)


def test_nul_is_a_character(server: Served) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", content=b'{"model": "parrot", "prompt": "[[a\\u0000b]]"}')
    assert answer.json()["choices"][0]["text"] == "a\0b"


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
def test_other_content_types(server: Served, kind: str) -> None:
    with server.http() as http:
        error_of(http.post("/v1/completions", content=b"{}", headers={"content-type": kind}), 415)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("POST", "/v1/audio/speech", 404, "unknown_url"),
        ("POST", "/v1/responses", 404, "unknown_url"),
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/%00%ff", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/nothing", 404, "model_not_found"),
    ],
)
def test_routes_we_do_not_have(server: Served, method: str, path: str, status: int, code: str) -> None:
    with server.http() as http:
        response = http.request(method, path)
    assert error_of(response, status)["code"] == code
    if status == 405:
        assert response.headers["allow"]


def test_request_ids(server: Served) -> None:
    with server.http() as http:
        assert http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert len(http.get("/health", headers={"X-Request-Id": "bad id"}).headers["x-request-id"]) == 32
        assert len(http.get("/v1/nothing").headers["x-request-id"]) == 32


def test_openapi_page_describes_the_bodies(server: Served) -> None:
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
        assert http.get("/version").json()["version"]
    content = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    assert schema["required"] == ["messages"]
    assert "tools" in schema["properties"]


def test_api_key_closes_everything_but_health_and_metrics() -> None:
    with serve_parrot(ServerConfig(api_key="s3cret-ü")) as served, served.http() as http:
        for path in ("/health", "/metrics"):
            assert http.get(path).status_code == 200
        closed = ["/v1/models", "/v1/models/parrot", "/version", "/docs", "/redoc", "/openapi.json", "/nothing"]
        for path in closed:
            for header in ({}, {"Authorization": "Bearer s3cret"}, {"Authorization": "s3cret-ü".encode()}):
                assert error_of(http.get(path, headers=header), 401)["code"] == "invalid_api_key"
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            error_of(http.post(path, json=CHAT), 401)
        key = {"Authorization": "Bearer s3cret-ü".encode()}
        assert http.post("/v1/chat/completions", json=CHAT, headers=key).status_code == 200
        assert error_of(http.get("/nothing", headers=key), 404)


def test_too_large_bodies_are_not_read() -> None:
    with serve_parrot(ServerConfig(max_request_bytes=10_000)) as served, served.http() as http:
        fits = {**CHAT, "user": "x" * 9_000}
        assert http.post("/v1/chat/completions", json=fits).status_code == 200
        response = http.post("/v1/chat/completions", json={**CHAT, "user": "x" * 10_000})
        assert error_of(response, 413)["code"] == "request_too_large"
        host, port = served.url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        # A length that is only announced, and a chunked upload that never ends by itself.
        for rest in (b"Content-Length: 99999999999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=10) as raw:
                # In one piece: what the server has not read when it closes would reset the connection under its answer.
                chunks = 12 * (b"3e8\r\n" + b" " * 1000 + b"\r\n") if b"chunked" in rest else b""
                raw.sendall(head + rest + chunks)
                answer = b""
                while piece := raw.recv(65536):
                    answer += piece
            assert answer.startswith(b"HTTP/1.1 413"), answer[:200]
            assert b"connection: close" in answer.lower()
            assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "request_too_large"


def test_all_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODIES", 2)
    with serve_parrot(ServerConfig(max_request_bytes=10_000), step=0.01) as served, served.http() as http:
        large = {**LONG, "stream": True, "user": "x" * 9_000}
        with (
            http.stream("POST", "/v1/completions", json=large) as first,
            http.stream("POST", "/v1/completions", json=large) as second,
        ):
            assert (first.status_code, second.status_code) == (200, 200)
            error_of(http.post("/v1/completions", json=large), 429)
        served.idle()
        assert http.post("/v1/chat/completions", json={**CHAT, "user": "x" * 9_000}).status_code == 200


@pytest.mark.parametrize("prompt", [[0] * 300_000, ["a"] * 300_000, [[0] * 300_000], "x" * 3_000_000])
def test_hopelessly_long_prompts_are_refused_early(server: Served, prompt: Any) -> None:
    with server.http() as http:
        response = http.post("/v1/completions", json={"prompt": prompt})
        assert error_of(response, 400)["param"] == "prompt"
        messages = [{"role": "user", "content": "a"}] * 300_000
        response = http.post("/v1/chat/completions", json={"messages": messages})
        assert error_of(response, 400)["code"] == "context_length_exceeded"


def test_too_many_requests() -> None:
    with serve_parrot(ServerConfig(max_connections=2), step=0.01) as served, served.http() as http:
        with (
            http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first,
            http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as second,
        ):
            assert (first.status_code, second.status_code) == (200, 200)
            refused = http.post("/v1/completions", json=LONG)
            assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 200
        served.idle()
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_full_engine_queue(stream: bool) -> None:
    with serve_parrot(max_queue=2, step=0.005) as served, served.http() as http:
        body = {"model": "parrot", "prompt": ["a", "b", "c"], "stream": stream}
        refused = http.post("/v1/completions", json=body)
        error_of(refused, 429)
        assert refused.headers["retry-after"]
        served.idle()
        assert http.post("/v1/completions", json={**body, "prompt": ["a", "b"]}).status_code == 200


def test_request_timeout() -> None:
    with serve_parrot(ServerConfig(request_timeout=0.3), step=0.02) as served, served.http() as http:
        response = http.post("/v1/completions", json=LONG)
        error_of(response, 408)
        assert response.headers["x-should-retry"] == "false"
        served.idle()
        text = http.post("/v1/completions", json={**LONG, "stream": True}).text
        events = [event for event in text.split("\n\n") if event]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert events[-1] == "data: [DONE]"


def test_cors() -> None:
    origins = "http://a.example, http://b.example"
    with serve_parrot(ServerConfig(allowed_origins=origins, api_key="k")) as served, served.http() as http:
        asks = {"Origin": "http://b.example", "Access-Control-Request-Method": "POST"}
        preflight = http.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://b.example"
        assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "http://c.example"}).headers


def test_unexpected_failures_are_500_objects(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with serve_parrot() as served, served.http() as http:

        def broken(*_args: object, **_options: object) -> None:
            raise RuntimeError("secret prompt text")

        monkeypatch.setattr(served.engine, "submit", broken)
        error = error_of(http.post("/v1/chat/completions", json=CHAT), 500)
        assert "secret" not in json.dumps(error)
        assert any(getattr(record, "error", "") == "RuntimeError" for record in caplog.records)
        assert "secret" not in caplog.text
        monkeypatch.undo()
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_dead_engine() -> None:
    with serve_parrot(step=0.01) as served, served.http() as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            served.call(served.engine.die)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert rest[-1] == "data: [DONE]"
        error_of(http.get("/health"), 503)
        assert error_of(http.post("/v1/completions", json=LONG), 503)["code"] == "engine_dead"
        error_of(http.post("/v1/completions", json={**LONG, "stream": True}), 503)
        assert "headrace:engine_up" in http.get("/metrics").text


def test_headers_without_end_are_cut_off(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ")
        sent, answer = 0, b""
        try:
            while sent < 64 << 20:
                raw.sendall(b"a" * 65536)
                sent += 65536
        except OSError:
            pass  # the server closed: what it said is still to be read, unless the reset swallowed it
        with contextlib.suppress(OSError):
            answer = raw.recv(1000)
    assert sent < 32 << 20
    assert not answer or b" 431 " in answer.split(b"\r\n")[0]
    with server.http() as http:
        assert http.get("/health", headers={"x-a": "a" * 20_000}).status_code == 200


def test_headers_that_never_end_time_out(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 408 ")
