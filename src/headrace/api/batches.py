"""/v1/batches: files of requests, run behind everything else."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.api.batch_object import batch_object
from headrace.api.batch_request import BatchRequest, check
from headrace.api.batch_service import BatchService
from headrace.api.chunks import encode
from headrace.api.errors import ApiError, disk_full
from headrace.api.paging import page
from headrace.api.schema import decode
from headrace.api.state import ServerState
from headrace.api.submit import read_body
from headrace.api.upload import PURPOSE
from headrace.core.errors import InvalidRequest
from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.spec import JOB_ID

log = logging.getLogger("headrace.api")

MOST_BATCHES = 100
_DECODER = msgspec.json.Decoder(BatchRequest)


def batch_routes(app: FastAPI, state: ServerState, batches: BatchService) -> None:
    """Add the routes."""

    @app.post("/v1/batches")
    async def _create(request: Request) -> Response:
        asked = decode(_DECODER, await read_body(request))
        check(asked)
        info = await asyncio.to_thread(state.files.get, asked.input_file_id)
        if info.purpose != PURPOSE:
            raise InvalidRequest(
                f"file {info.id} has the purpose {info.purpose!r}; a batch needs one uploaded for `batch`",
                "input_file_id",
            )
        folder = await batches.create(asked)
        return _json(await asyncio.to_thread(told, folder, batches.predicted()))

    @app.get("/v1/batches")
    async def _list(request: Request) -> Response:
        folders = await asyncio.to_thread(batches.folders.all)
        found = page(folders, request.query_params, MOST_BATCHES, lambda folder: folder.id)
        found["data"] = await asyncio.to_thread(_readable, found["data"], batches.predicted())
        return _json(found)

    @app.get("/v1/batches/{batch_id}")
    async def _batch(batch_id: str) -> Response:
        folder = await asyncio.to_thread(batches.folders.get, checked(batch_id))
        return _json(await asyncio.to_thread(told, folder, batches.predicted()))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def _cancel(batch_id: str) -> Response:
        folder = await asyncio.to_thread(batches.folders.get, checked(batch_id))
        await asyncio.to_thread(told, folder, {})  # or the error of one that cannot be read
        await batches.cancel(folder)
        return _json(await asyncio.to_thread(told, folder, batches.predicted()))


def told(folder: JobFolder, predicted: Mapping[str, float]) -> dict[str, Any]:
    """The object of one batch.

    Args:
        folder: of the job.
        predicted: when batches are expected to end, by their ids.

    Raises:
        ApiError: 500, its journal cannot be read.
        JobError: the disk is full, which is no fault of this one.
    """
    try:
        return batch_object(folder, predicted.get(folder.id))
    except JobError as error:
        if disk_full(error):
            raise
        log.warning("a batch cannot be read", extra={"batch": folder.id, "reason": str(error)})
        message = f"The journal of {folder.id} cannot be read; the server's log says why"
        headers = {"x-should-retry": "false"}
        raise ApiError(
            500, message, "server_error", param="batch_id", code="batch_unreadable", headers=headers
        ) from error


def _readable(folders: Sequence[JobFolder], predicted: Mapping[str, float]) -> list[dict[str, Any]]:
    found = []
    for folder in folders:
        with suppress(ApiError):  # the log has it; it hides none of the others
            found.append(told(folder, predicted))
    return found


def checked(batch_id: str) -> str:
    """An id that can be part of a path.

    Raises:
        ApiError: the 404 of one that cannot.
    """
    if not JOB_ID.fullmatch(batch_id):
        shown = batch_id[:100] if batch_id.isprintable() else "with that id"
        raise ApiError(404, f"No batch found: {shown}", param="batch_id", code="batch_not_found")
    return batch_id


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
