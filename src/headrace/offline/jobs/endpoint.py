"""What a job needs from whoever knows what bodies mean and has an engine; the HTTP room hands it in."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.journal import Journal


@dataclass(slots=True)
class Asked:
    """A body that can be run.

    Attributes:
        prompts: token ids; more than one where the body has several prompts.
        most: tokens that all its sequences may generate together.
        kin: equal for bodies whose answers are thought to be of like length (route, system prompt, class of most).
        handle: the endpoint's own.
        produced: tokens generated so far; kept up to date while it runs.
    """

    prompts: list[list[int]]
    most: int
    kin: bytes
    handle: Any
    produced: int = field(default=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a body, as an HTTP client would have seen it.

    Attributes:
        status: 200, or the status of the refusal.
        request_id: of the answer.
        body: JSON.
        prompt_tokens: of its prompts.
        cached_tokens: of them, those that were not computed.
        output_tokens: generated.
    """

    status: int
    request_id: str
    body: bytes
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Endpoint(Protocol):
    """Routes that lines may name."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The routes."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of the model that answers."""
        ...

    async def prepare(self, url: str, body: bytes) -> Asked:
        """Understand a body.

        Raises:
            HeadraceError: it is refused; see `refusal`.
        """
        ...

    async def run(self, asked: Asked, share: float, worker: int = 0) -> Answer:
        """Generate, behind online work; cancelling it aborts.

        Args:
            asked: from `prepare`.
            share: see `core.request.Request.share`.
            worker: number of the engine that does it.

        Raises:
            QueueFull: not now.
            EngineDead: never again on this worker.
        """
        ...

    def pace(self, worker: int, tokens: int | None) -> None:
        """Have prompts fill that worker's steps up to so many tokens only; None: as far as they go."""
        ...

    def refusal(self, error: BaseException) -> Answer:
        """What an HTTP client would have been told."""
        ...


def check_model(journal: Journal, endpoint: Endpoint) -> None:
    """Note the model of a new job; one that was begun must go on with the same.

    Raises:
        JobError: it is another.
    """
    state, loaded = journal.state, endpoint.fingerprint
    state.fingerprint = state.fingerprint or loaded
    if state.fingerprint != loaded:
        raise JobError(
            f"job {journal.spec.id} was begun with the model of fingerprint {state.fingerprint[:12]}, the one loaded "
            f"now has {loaded[:12]}, and answers of two models are not mixed: put the first one back, or run the input "
            "as a new job"
        )
