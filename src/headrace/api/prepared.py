"""A request body that has been understood: what to generate, and how its answer is written.

The one place where a body gets its meaning, for the HTTP routes and for the lines of a batch alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.chunks import encode
from headrace.api.meter import Meter
from headrace.api.running import Batch, drain
from headrace.api.schema import GenerationFields
from headrace.api.state import ServerState
from headrace.api.streaming import Answer, EventStream
from headrace.api.submit import submit
from headrace.core.sampling import SamplingParams


class Whole(Protocol):
    """Gathers an answer that is given in one piece."""

    def add(self, batch: Batch) -> None:
        """Take new deltas."""
        ...

    def body(self) -> dict[str, Any]:
        """The response, once all deltas are in."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A body that can be run; nothing has been submitted yet.

    Attributes:
        request: the fields that all bodies share.
        id: of the answer.
        prompts: token ids, one or several prompts.
        params: for all of them.
        param: the field that errors about a prompt name.
        whole: makes what gathers the answer in one piece.
        stream: makes what writes the answer as a stream.
    """

    request: GenerationFields
    id: str
    prompts: list[list[int]]
    params: SamplingParams
    param: str
    whole: Callable[[Meter], Whole]
    stream: Callable[[Meter], Answer]


async def respond(state: ServerState, request: Request, prepared: Prepared, meter: Meter) -> Response:
    """Run a prepared body for an HTTP client, streamed or in one piece.

    Raises:
        HeadraceError: refused, with its HTTP face in `errors.as_api_error`.
    """
    streams = await submit(state, prepared.request, prepared.id, prepared.prompts, prepared.params, prepared.param)
    if prepared.request.stream:
        return EventStream(state, streams, prepared.stream(meter))
    whole = prepared.whole(meter)
    await drain(state, streams, request.receive, whole.add)
    return Response(encode(whole.body()), media_type="application/json")
