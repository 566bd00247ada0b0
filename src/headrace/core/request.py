"""What the front hands to an engine: one sequence to generate."""

from typing import Literal

import msgspec

from headrace.core.sampling import SamplingParams

ServiceClass = Literal["online", "offline"]

OFFLINE_SHARE = 0.2


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A client request with n > 1 or several prompts is several of these.

    Attributes:
        id: unique among the requests in flight.
        prompt: token ids, at least one.
        params: sampling parameters; `max_tokens` and `seed` are filled in by the front, `n` is ignored.
        service: `offline` work fills what `online` leaves.
        priority: lower runs first within its class; ties by arrival.
        cache_salt: KV is shared only among requests with the same salt.
        arrival: seconds since the epoch, for queueing-time metrics.
        share: of an offline request: a step that holds online tokens may take longer by this share of its predicted
            time for the sake of offline ones; the largest share of those in the engine counts.
        resume: tokens already produced elsewhere for this sequence; generation goes on after them.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    service: ServiceClass = "online"
    priority: int = 0
    cache_salt: str = ""
    arrival: float = 0.0
    resume: list[int] = []
    share: float = OFFLINE_SHARE
