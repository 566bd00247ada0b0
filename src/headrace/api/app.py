"""The application: routes, and OpenAI's error object for everything else."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from headrace.api.batch_service import BatchService
from headrace.api.batches import batch_routes
from headrace.api.chat import chat_completions
from headrace.api.chunks import encode
from headrace.api.completions import completions
from headrace.api.edge import Edge
from headrace.api.errors import ApiError, as_api_error
from headrace.api.file_store import FileStore
from headrace.api.files import file_routes
from headrace.api.metrics import CONTENT_TYPE, Metrics
from headrace.api.models import model_card, model_list
from headrace.api.reasoning import OPEN
from headrace.api.running import ClientGone
from headrace.api.schema_chat import ChatRequest
from headrace.api.schema_completion import CompletionRequest, DetokenizeRequest, TokenizeRequest
from headrace.api.state import ServerState
from headrace.api.token_text import TokenText
from headrace.api.tokens import detokenize, tokenize
from headrace.core import paths
from headrace.core.config import EngineConfig, ServerConfig
from headrace.core.errors import EngineDead, HeadraceError
from headrace.front.generator import Generator
from headrace.offline.jobs.folder import held_bytes
from headrace.version import __version__

ABSENT = (
    "/v1/embeddings",
    "/v1/audio",
    "/v1/images",
    "/v1/videos",
    "/v1/moderations",
    "/v1/responses",
    "/v1/conversations",
    "/v1/assistants",
    "/v1/threads",
    "/v1/fine_tuning",
    "/v1/vector_stores",
    "/v1/uploads",
    "/v1/realtime",
    "/v1/evals",
    "/v1/containers",
    "/v1/rerank",
    "/v1/score",
)


def make_state(
    generator: Generator,
    config: ServerConfig,
    engine: EngineConfig | None = None,
    home: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> ServerState:
    """What the routes share, with the names and parsers that the configuration and the model imply.

    Args:
        generator: over the engine.
        config: of the server.
        engine: what the engine was configured with; None: its defaults.
        home: where files and batches lie; None: `HEADRACE_HOME`.
        clock: seconds since the epoch, for files.
    """
    home = home or paths.home()
    tokenizer, info = generator.tokenizer, generator.client.info
    model = config.served_model_name or (Path(info.model).name if Path(info.model).exists() else info.model)
    knows_think = OPEN in (tokenizer.chat_template or "") or tokenizer.token_id(OPEN) is not None
    return ServerState(
        client=generator.client,
        generator=generator,
        tokenizer=tokenizer,
        config=config,
        texts=TokenText(tokenizer, info.eos_token_ids),
        model=model,
        metrics=Metrics(model),
        hermes=config.tool_parser != "none",
        engine=engine or EngineConfig(),
        files=FileStore(home / "files", config.max_files_bytes, lambda: held_bytes(home / "jobs"), clock),
        jobs=home / "jobs",
        think=config.reasoning_parser == "think" or (config.reasoning_parser == "auto" and knows_think),
    )


def create_app(state: ServerState, batches: BatchService | None = None) -> FastAPI:
    """The ASGI application over one engine; `batches` runs the jobs, None: one made here."""
    app = FastAPI(title="Headrace", version=__version__, redirect_slashes=False)
    _generation_routes(app, state)
    file_routes(app, state)
    batch_routes(app, state, batches or BatchService(state))
    _other_routes(app, state)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(HeadraceError, _refused)
    app.add_middleware(Edge, state=state)
    origins = [origin.strip() for origin in state.config.allowed_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _generation_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def _chat(request: Request) -> Response:
        return await chat_completions(state, request, request.state.meter)

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def _completions(request: Request) -> Response:
        return await completions(state, request, request.state.meter)

    @app.post("/tokenize", openapi_extra=_body(TokenizeRequest))
    async def _tokenize(request: Request) -> Response:
        return await tokenize(state, request)

    @app.post("/detokenize", openapi_extra=_body(DetokenizeRequest))
    async def _detokenize(request: Request) -> Response:
        return await detokenize(state, request)


def _other_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models")
    async def _models() -> Response:
        return _json(model_list(state))

    @app.get("/v1/models/{name:path}")
    async def _model(name: str) -> Response:
        return _json(model_card(state, name))

    @app.get("/health")
    async def _health() -> Response:
        await state.stats()
        return Response()

    @app.get("/metrics")
    async def _metrics() -> Response:
        try:
            stats = await state.stats()
        except EngineDead:
            stats = None
        return Response(state.metrics.text(stats), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def _version() -> Response:
        return _json({"version": __version__})


def _body(model: type) -> dict[str, Any]:
    """A route's request schema for the OpenAPI page, with every definition in place."""
    (schema,), definitions = msgspec.json.schema_components([model], ref_template="#/$defs/{name}")
    whole = _inlined(schema, definitions)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


async def _refused(_request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        raise error
    return as_api_error(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    what = f"{request.method} {request.url.path[:200]}"
    if status == 404:
        known = request.url.path.startswith(ABSENT)
        tell = (
            "is not available: this server has chat and text completions, files and batches of them"
            if known
            else "does not exist"
        )
        return ApiError(404, f"{what} {tell}", code="unknown_url", headers=headers).response()
    if status == 405:
        return ApiError(405, f"{what}: method not allowed", code="method_not_allowed", headers=headers).response()
    return ApiError(status, str(getattr(error, "detail", "refused")), headers=headers).response()
