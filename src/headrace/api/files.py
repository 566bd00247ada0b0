"""/v1/files: uploads for batches, and what batches wrote."""

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.api.chunks import encode
from headrace.api.content import Content
from headrace.api.paging import page
from headrace.api.state import ServerState
from headrace.api.upload import receive_file

MOST_FILES = 10_000


def file_routes(app: FastAPI, state: ServerState) -> None:
    """Add the routes."""
    files = state.files

    @app.post("/v1/files")
    async def _upload(request: Request) -> Response:
        return _json(await receive_file(request, files, state.config.max_file_bytes))

    @app.get("/v1/files")
    async def _list(request: Request) -> Response:
        query = request.query_params
        found = await asyncio.to_thread(files.list, query.get("purpose"))
        return _json(page(found, query, MOST_FILES, lambda info: info.id))

    @app.get("/v1/files/{file_id}")
    async def _file(file_id: str) -> Response:
        return _json(await asyncio.to_thread(files.get, file_id))

    @app.get("/v1/files/{file_id}/content")
    async def _content(file_id: str, request: Request) -> Response:
        file = await asyncio.to_thread(files.open, file_id)
        try:
            return Content(file, request.headers.get("range"))
        except BaseException:
            file.close()
            raise

    @app.delete("/v1/files/{file_id}")
    async def _delete(file_id: str) -> Response:
        await asyncio.to_thread(files.delete, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
