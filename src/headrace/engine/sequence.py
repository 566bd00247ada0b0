"""One sequence inside an engine: its tokens, its pages, and how far they are computed."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.core.events import FinishReason
from headrace.core.request import Request

SequenceState = Literal["waiting", "running", "finished"]


class Sequence:
    """Tokens and KV pages of one request.

    Invariant: `computed <= scheduled <= length`. Tokens below `computed` have their KV in the pool, those between
    `computed` and `scheduled` belong to a load or to plans in flight, the rest is still to be planned.

    Attributes:
        request: what was asked.
        order: arrival number in this engine; ties of priority go to the older one.
        length: prompt plus output tokens so far.
        pages: page numbers in order of position.
        row: row of the block table while running, else -1.
        hashes: keys of the full pages known so far, a chain over the token ids.
        indexed: pages already entered into the prefix index (or found there).
        in_flight: plans not yet complete that hold this sequence.
        cached_tokens: prompt tokens that the first admission did not leave to compute; -1 before it.
        cached_by_source: the same by source, `pool` or a tier's name.
        loading: a stored prefix is on its way into the pages between `computed` and `scheduled`.
        counting: what it finds stored counts as hits: it has not been preempted yet.
        fence: the token that plans may go up to, because another engine computes what comes next; None: no limit.
        hole: tokens `[a, b)` that a load brings while plans cover those before them; None: there is no such split.
        doomed: the finish reason to take as soon as nothing is in flight (set by an abort or an error).
        error: what went wrong, with finish `error`.
    """

    __slots__ = (
        "_tokens",
        "cached_by_source",
        "cached_tokens",
        "computed",
        "counting",
        "doomed",
        "error",
        "fence",
        "hashes",
        "hole",
        "in_flight",
        "indexed",
        "length",
        "loading",
        "max_tokens",
        "order",
        "pages",
        "request",
        "row",
        "scheduled",
        "state",
    )

    def __init__(self, request: Request, order: int, max_model_len: int) -> None:
        prompt, resume = request.prompt, request.resume
        room = max_model_len - len(prompt)
        wanted = request.params.max_tokens
        self.request = request
        self.order = order
        self.max_tokens = room if wanted is None else min(wanted, room)
        self._tokens: NDArray[np.int32] = np.empty(len(prompt) + max(self.max_tokens, len(resume)), np.int32)
        self._tokens[: len(prompt)] = prompt
        self._tokens[len(prompt) : len(prompt) + len(resume)] = resume
        self.length = len(prompt) + len(resume)
        self.computed = 0
        self.scheduled = 0
        self.pages: list[int] = []
        self.row = -1
        self.hashes: list[bytes] = []
        self.in_flight = 0
        self.indexed = 0
        self.cached_tokens = -1
        self.cached_by_source: dict[str, int] = {}
        self.loading = False
        self.counting = True
        self.fence: int | None = None
        self.hole: tuple[int, int] | None = None
        self.state: SequenceState = "waiting"
        self.doomed: FinishReason | None = None
        self.error: str | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def online(self) -> bool:
        """True when somebody waits for the answer."""
        return self.request.service == "online"

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def output_length(self) -> int:
        """Tokens generated so far."""
        return self.length - self.prompt_length

    @property
    def remaining(self) -> int:
        """Known tokens that no plan covers yet: 1 in decode, more in prefill, 0 while the next token is in flight."""
        return self.length - self.scheduled

    @property
    def plannable(self) -> int:
        """Of these, tokens that a plan may cover now: those before a hole or a fence, if there is one."""
        if self.hole is not None:
            return self.hole[0] - self.scheduled  # a fence never comes before the end of what is loaded
        return (self.length if self.fence is None else self.fence) - self.scheduled

    @property
    def decoding(self) -> bool:
        """True when only the newest token is left to compute."""
        return self.remaining == 1 and self.output_length > 0

    @property
    def held(self) -> bool:
        """True while a plan in flight or a load uses the pages: they cannot be taken away."""
        return self.in_flight > 0 or self.loading

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens so far (a view)."""
        return self._tokens[: self.length]

    @property
    def prompt(self) -> NDArray[np.int32]:
        """The prompt (a view)."""
        return self._tokens[: self.prompt_length]

    @property
    def output(self) -> NDArray[np.int32]:
        """What was generated (a view)."""
        return self._tokens[self.prompt_length : self.length]

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Order of service: online before offline, then priority, then arrival. The largest is preempted first."""
        return (not self.online, self.request.priority, self.order)

    def append(self, token: int) -> None:
        """Add a generated token."""
        self._tokens[self.length] = token
        self.length += 1
