"""No request body makes the server fail: arbitrary JSON in every field, broken JSON, arbitrary bytes."""

import asyncio
import json
import socket
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import parrot_state, serve_parrot

from headrace.api.app import create_app
from headrace.api.schema_chat import ChatRequest
from headrace.api.schema_completion import CompletionRequest, DetokenizeRequest, TokenizeRequest
from headrace.core.config import ServerConfig

ROUTES: dict[str, type] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
EDGES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 20, 128, 2**31, 2**63, -(2**63) - 1, 10**40, 0.0, 0.5, -0.5, 1e308, "", "a", "auto",
    "none", "required", "flex", "default", "parrot", "[[ab]]", "\0", "\U0001f600", "<think>", "<tool_call>", "[", ".*",
    'start: "a"', [], ["a"], [[]], [1, 2], ["a", 1], [None], {}, {"type": "text"}, {"type": "json_object"},
    {"5": 1}, {"a": 1}, {"include_usage": True}, {"type": "object"}, {"name": "f"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}},
    {"type": "function", "function": {"name": "f"}},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nothing"}}}],
    [{"role": "user", "content": "hi"}], [{"role": "tool", "content": "x"}], [{"role": "user"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
]  # fmt: skip
JSON = st.recursive(
    st.sampled_from(EDGES) | st.text(st.characters(exclude_categories=()), max_size=8) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Sends requests to the app on a loop of this thread; an exception that leaves the app is raised here."""
    with asyncio.Runner() as runner:

        async def make() -> httpx.AsyncClient:
            _, state = parrot_state(ServerConfig(max_request_bytes=100_000), max_model_len=160)
            return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(state)), base_url="http://app")

        http = runner.run(make())
        yield lambda *args, **options: runner.run(http.request(*args, **options))
        runner.run(http.aclose())


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve_parrot() as served, served.http() as client:
        yield client


def usable(route: str) -> dict[str, Any]:
    """A body that is answered, and shortly; what is fuzzed replaces parts of it."""
    if route == "/v1/chat/completions":
        return {"messages": [{"role": "user", "content": "[[hi]]"}], "max_tokens": 4}
    return {"tokens": [1]} if route == "/detokenize" else {"prompt": "[[hi]]", "max_tokens": 4}


def typed(kind: Any) -> st.SearchStrategy[Any]:
    """JSON of the right type for a field, so that what comes after type checking is reached as well."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([typed(each) for each in inner])
    if origin is list:
        return st.lists(typed(inner[0]), max_size=3)
    if origin is dict:
        key = st.integers(-2, 300).map(str) if inner[0] is int else st.sampled_from(["type", "a", "$ref", "properties"])
        return st.dictionaries(key, typed(inner[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        needed = {f.encode_name: typed(f.type) for f in fields if f.required}
        return st.fixed_dictionaries(needed, optional={f.encode_name: typed(f.type) for f in fields if not f.required})
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: st.sampled_from([edge for edge in EDGES if isinstance(edge, str)]) | st.sampled_from(["user", "function"]),
        int: st.integers(-2, 300) | st.integers(),
        float: st.floats(-3, 3) | st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        type(None): st.none(),
        Any: JSON,
    }
    return simple[kind]


@st.composite
def typed_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    route = draw(st.sampled_from(list(ROUTES)))
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(ROUTES[route])}
    chosen = draw(st.lists(st.sampled_from(list(fields)), max_size=3, unique=True))
    values = {name: draw(typed(fields[name])) for name in chosen}
    return route, json.dumps(usable(route) | values).encode()


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    route = draw(st.sampled_from(list(ROUTES)))
    names = [field.encode_name for field in msgspec.structs.fields(ROUTES[route])]
    body = usable(route) | draw(st.dictionaries(st.sampled_from(names), JSON, max_size=4))
    data = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 3)) :]
    return route, data


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, (response.status_code, response.text)
    if response.status_code == 200:
        assert "server_error" not in response.text
        return
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert "\n" not in error["message"].strip()


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=bodies() | typed_bodies())
def test_no_body_makes_the_server_fail(ask: Ask, request: tuple[str, bytes]) -> None:
    route, data = request
    check(ask("POST", route, content=data, headers={"content-type": "application/json"}))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]),
    path=st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(list(ROUTES)),
    data=st.binary(max_size=20),
)
def test_no_path_makes_the_server_fail(ask: Ask, method: str, path: str, data: bytes) -> None:
    assert ask(method, "/" + quote(path.lstrip("/")), content=data).status_code < 500


@pytest.mark.parametrize(
    "start",
    [
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%ff%fe?\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nX-Request-Id: \xff\r\n\r\nnull",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 100,
    ],
)
def test_no_bytes_make_the_server_fail(http: httpx.Client, start: bytes) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=10) as raw:
        raw.sendall(start)
        raw.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := raw.recv(65536):
            answer += piece
    assert b" 500 " not in answer.split(b"\r\n")[0]
    assert http.get("/health").status_code == 200
