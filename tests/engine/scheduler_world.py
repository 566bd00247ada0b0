"""A device without a model: page slots remember which prefix they hold, so a scheduler's mistakes show."""

from collections import deque
from dataclasses import dataclass, field

from headrace.core.config import SchedulerConfig
from headrace.core.plan import StepPlan
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.outcome import LoadOrder, Progress, StepResult
from headrace.engine.pages import PageAllocator
from headrace.engine.prefix_index import PageHasher, PrefixIndex
from headrace.engine.scheduler import Claim, MeetingPoint, Scheduler, StoredPrefix
from headrace.engine.sequence import Sequence
from headrace.engine.sequence_pages import SequencePages
from headrace.perf.step_time import StepTimeModel

PAGE = 4
VOCABULARY = 50


def next_token(tokens: tuple[int, ...], salt: str = "") -> int:
    """The "model": the next token is a function of all before."""
    return hash((salt, tokens)) % VOCABULARY


def answer(request: Request) -> list[int]:
    """What a request must yield."""
    tokens = tuple(request.prompt)
    out: list[int] = []
    while len(out) < (request.params.max_tokens or 0):
        out.append(next_token(tokens + tuple(out)))
    return out


@dataclass
class World:
    """A scheduler with its pool and a device that checks the KV it reads."""

    pages: int = 24
    depth: int = 1
    budget: int = 12
    seqs: int = 4
    max_len: int = 64
    caching: bool = True
    itl_target: float = 0.0
    model: StepTimeModel | None = None
    stored: StoredPrefix | None = None
    meet: MeetingPoint | None = None
    claim: Claim | None = None
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    computed: int = 0
    copied: int = 0

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.budget,
            pipeline_depth=self.depth,
            itl_target=self.itl_target,
        )
        self.index = PrefixIndex()
        self.allocator = PageAllocator(self.pages, self.index)
        pages = SequencePages(self.allocator, self.index, PageHasher("world", PAGE), PAGE, self.caching)
        self.scheduler = Scheduler(
            config, pages, self.max_len, (), self.model, self.stored, self.meet, self.claim, self.left.append
        )
        self.slots: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.flight: deque[StepPlan] = deque()
        self.requests: dict[str, Request] = {}
        self.plans: list[StepPlan] = []

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        online: bool = True,
        priority: int = 0,
        salt: str = "",
        stop: tuple[int, ...] = (),
    ) -> Request:
        """Queue a request."""
        request = Request(
            id=request_id,
            prompt=prompt,
            params=SamplingParams(max_tokens=max_tokens, temperature=0, stop_token_ids=stop),
            service="online" if online else "offline",
            priority=priority,
            cache_salt=salt,
        )
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.add(Sequence(request, len(self.requests), self.max_len))
        return request

    def schedule(self, exclude: frozenset[str] = frozenset()) -> StepPlan | None:
        """The next plan; pages are copied as it counts on."""
        plan = self.scheduler.schedule(exclude)
        self._copy(self.scheduler.take_copies())
        return plan

    def submit(self) -> StepPlan | None:
        """Put one more plan in flight if there is something to do. The device computes in order, at once."""
        plan = self.schedule()
        if plan is not None:
            assert plan.tokens <= self.budget
            self.flight.append(plan)
            self.plans.append(plan)
            for chunk in plan.chunks:
                self._compute(self.scheduler.get(chunk.seq), chunk.start, chunk.end)
        self.scheduler.check()
        return plan

    def bring(self, order: LoadOrder, tokens: int, sources: dict[str, int]) -> None:
        """A load ends with so many of the sequence's first tokens in the pool."""
        seq = order.seq
        salt, known = seq.request.cache_salt, tuple(seq.tokens.tolist())
        for position in range(order.start, tokens):
            self.slots[seq.pages[position // PAGE] * PAGE + position % PAGE] = (salt, known[: position + 1])
        self.scheduler.loaded(order, tokens, sources)
        self.scheduler.check()

    def collect(self) -> list[Progress]:
        """Complete the oldest plan in flight."""
        plan = self.flight.popleft()
        tokens = {}
        for chunk in plan.chunks:
            seq = self.scheduler.get(chunk.seq)
            if chunk.sample:
                tokens[chunk.seq] = [next_token(tuple(seq.tokens.tolist()))]
        return self._record(self.scheduler.complete(plan.id, StepResult(tokens, 0.01)))

    def abandon(self) -> None:
        """Give the oldest plan up."""
        self._record(self.scheduler.abandon(self.flight.popleft().id))

    def abort(self, request_id: str) -> None:
        """End a request."""
        seq = self.scheduler.abort(request_id)
        if seq is not None:
            self.finished[request_id] = "abort"
        self.scheduler.check()

    def step(self) -> StepPlan | None:
        """Fill the pipeline, complete the oldest plan; returns it."""
        while len(self.flight) < self.depth and self.submit() is not None:
            pass
        if not self.flight:
            return None
        oldest = self.flight[0]
        self.collect()
        return oldest

    def drain(self, most: int = 2000) -> None:
        """Step until nothing is left."""
        for _ in range(most):
            if self.step() is None:
                assert self.scheduler.idle, "work is left, but nothing is planned"
                return
        raise AssertionError("not finished")

    def _record(self, progress: list[Progress]) -> list[Progress]:
        for item in progress:
            self.outputs[item.seq.id] += item.tokens
            if item.finish is not None:
                assert item.seq.id not in self.finished, "finished twice"
                self.finished[item.seq.id] = item.finish
        self.scheduler.check()
        return progress

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages: beyond what the copy was made for, the target's tokens are somebody else's."""
        old = dict(self.slots)
        for source, target in copies:
            for offset in range(PAGE):
                self.slots.pop(target * PAGE + offset, None)
                if source * PAGE + offset in old:
                    self.slots[target * PAGE + offset] = old[source * PAGE + offset]
        self.copied += len(copies)

    def _compute(self, seq: Sequence, start: int, end: int) -> None:
        salt, tokens = seq.request.cache_salt, tuple(seq.tokens.tolist())
        for position in range(start):
            slot = seq.pages[position // PAGE] * PAGE + position % PAGE
            assert self.slots.get(slot) == (salt, tokens[: position + 1]), f"{seq.id} reads wrong KV at {position}"
        for position in range(start, end):
            self.slots[seq.pages[position // PAGE] * PAGE + position % PAGE] = (salt, tokens[: position + 1])
        self.computed += end - start
