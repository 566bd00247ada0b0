"""Handing a request's prompts to the generator, all or none."""

import uuid
from collections.abc import Sequence

from starlette.requests import Request

from headrace.api.running import ClientGone
from headrace.api.sampling import cache_salt, priority, service_class
from headrace.api.schema import GenerationFields, check_content_type
from headrace.api.state import ServerState
from headrace.core.errors import EngineDead, InvalidRequest
from headrace.core.request import OFFLINE_SHARE, ServiceClass
from headrace.core.sampling import SamplingParams
from headrace.front.generator import TextStream


def new_id(prefix: str) -> str:
    """An id as OpenAI's look, unique among all requests."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def read_body(request: Request) -> bytes:
    """The body of a JSON request.

    Raises:
        ApiError: it is not declared as JSON, or too large (from the edge).
        ClientGone: the client left before it was complete.
    """
    check_content_type(request.headers.get("content-type"))
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def standing(request: GenerationFields) -> tuple[ServiceClass, int, str]:
    """A request's class, priority and cache salt.

    Raises:
        InvalidRequest: one of them is wrong.
    """
    return service_class(request), priority(request), cache_salt(request)


async def submit(
    state: ServerState,
    request: GenerationFields,
    request_id: str,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    param: str,
    service: ServiceClass | None = None,
    share: float = OFFLINE_SHARE,
) -> list[TextStream]:
    """Start the generation of every prompt; if one is refused, none stays.

    Args:
        state: the server's.
        request: for its class, priority and cache salt.
        request_id: of the whole.
        prompts: token ids.
        params: for all of them.
        param: the field that errors about the prompt name.
        service: in place of the class that the request asks for.
        share: of steps, see `core.request.Request`.

    Raises:
        InvalidRequest: of the prompt or the parameters.
        QueueFull: no room for all of them.
        EngineDead: the engine has ended.
    """
    asked, rank, salt = standing(request)
    streams: list[TextStream] = []
    try:
        for i, prompt in enumerate(prompts):
            stream = await state.generator.start(
                prompt,
                params,
                request_id=f"{request_id}-{i}",
                service=service or asked,
                priority=rank,
                cache_salt=salt,
                share=share,
            )
            streams.append(stream)
    except BaseException as error:
        for stream in streams:
            await stream.aclose()
        if isinstance(error, EngineDead):
            state.dead = error
        if isinstance(error, InvalidRequest) and error.param in ("prompt", "messages"):
            raise InvalidRequest(str(error), param, error.code) from None
        raise
    return streams
