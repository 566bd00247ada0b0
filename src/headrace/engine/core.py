"""An engine: requests in, tokens out, one step at a time. Belongs to one thread."""

from collections.abc import Callable

from headrace.core.config import EngineConfig
from headrace.core.errors import InvalidRequest, QueueFull
from headrace.core.events import Delta, EngineInfo, EngineStats, TokenLogprob
from headrace.core.plan import StepPlan
from headrace.core.request import Request
from headrace.engine.build import EngineParts
from headrace.engine.outcome import Progress
from headrace.engine.runner import StepOutput
from headrace.engine.sampling import RowState
from headrace.engine.sequence import Sequence


class Engine:
    """Continuous batching over one model and one KV pool.

    `add` and `abort` may be called between steps, and from `interrupt` in the middle of one. Nothing here blocks but
    `step`, which takes as long as a forward pass.

    Args:
        config: limits.
        parts: what `build` made.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts) -> None:
        self._config = config
        self._parts = parts
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._states: dict[str, RowState] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        self._unreported: set[str] = set()
        self._ended: list[Delta] = []
        self._arrivals = 0

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        return self._parts.info

    @property
    def idle(self) -> bool:
        """True when a step would do nothing."""
        return self._scheduler.idle and not self._ended

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFull: too many are in flight.
            InvalidRequest: it can never run: empty, too long, tokens outside the vocabulary, a bad grammar, a used id.
        """
        limit = self._config.scheduler.max_queue
        if len(self._scheduler) >= limit:
            raise QueueFull(f"{limit} requests are in flight already; try again later")
        self._check(request)
        state = self._parts.sampler.open(request.params, request.prompt)
        if request.resume:
            state.resume(request.resume)
        self._arrivals += 1
        seq = Sequence(request, self._arrivals, self.info.max_model_len)
        self._states[request.id] = state
        self._unreported.add(request.id)
        self._scheduler.add(seq)

    def abort(self, request_id: str) -> None:
        """End a request; its last delta (finish `abort`) comes with the next step. Unknown ids are ignored."""
        seq = self._scheduler.abort(request_id)
        if seq is not None:
            self._ended.append(self._delta(Progress(seq, finish="abort"), None))

    def step(self, interrupt: Callable[[], bool] | None = None) -> list[Delta]:
        """Fill the plans in flight, finish the oldest, and report what became of its sequences.

        Args:
            interrupt: asked between layers of a step that is all offline; it may `add` and `abort`, and returns True
                when the step should be given up for online work.
        """
        depth = self._config.scheduler.pipeline_depth
        while len(self._runner) < depth:
            plan = self._scheduler.schedule()
            if plan is None:
                break
            self._runner.submit(plan, [self._scheduler.get(chunk.seq) for chunk in plan.chunks])
        deltas, self._ended = self._ended, []
        if not len(self._runner):
            return deltas
        output = self._runner.collect(self._states.__getitem__, interrupt)
        if output.result is None:
            progress = self._scheduler.abandon(output.plan.id)
        else:
            self._keep_prompt_logprobs(output.plan, output)
            progress = self._scheduler.complete(output.plan.id, output.result)
        deltas += self._ended
        self._ended = []
        deltas += [self._delta(item, output) for item in progress]
        return deltas

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        counters, allocator = self._scheduler.counters, self._parts.group.allocator
        return EngineStats(
            waiting=self._scheduler.waiting,
            running=len(self._scheduler.running),
            pages_total=allocator.total,
            pages_used=allocator.used,
            prompt_tokens_total=counters.prompt_tokens,
            hit_tokens_total=counters.hit_tokens,
            computed_tokens_total=counters.computed_tokens,
            output_tokens_total=counters.output_tokens,
            preemptions_total=counters.preemptions,
            abandoned_total=counters.abandoned,
            steps_total=counters.steps,
            step_seconds_total=counters.step_seconds,
            requests_total=dict(counters.finished),
        )

    @property
    def online_waiting(self) -> bool:
        """True when an online request is in the queue: a reason to give up an offline step."""
        return self._scheduler.online_waiting

    def resize_kv(self, nbytes: int) -> None:
        """Grow or shrink the KV pool live, between steps.

        Raises:
            InvalidRequest: what is in flight could then never finish.
            ConfigError, OutOfPages: as `KVGroup.resize`; nothing is changed.
        """
        group, scheduler = self._parts.group, self._scheduler
        if len(self._runner):
            raise InvalidRequest("the KV pool cannot be resized while a step is in flight")
        pages = group.shape.pages_in(nbytes)
        size = group.shape.page_size
        longest = max((-(-(s.prompt_length + s.max_tokens) // size) for s in scheduler.sequences), default=0)
        if pages < longest:
            raise InvalidRequest(f"a request in flight may need {longest} KV pages, {nbytes} bytes are {pages}")
        while group.allocator.used > pages:
            scheduler.preempt_last()
        group.resize(pages, scheduler.running)
        self._runner.pages_moved()

    def check(self) -> None:
        """Raise AssertionError unless pages, rows and states agree (for tests)."""
        self._scheduler.check()
        if set(self._states) != {seq.id for seq in self._scheduler.sequences}:
            raise AssertionError("sampling states and sequences differ")

    def _check(self, request: Request) -> None:
        info = self.info
        prompt = request.prompt
        if not prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        if request.id in self._scheduler:
            raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
        known = len(prompt) + len(request.resume)
        if known + 1 > info.max_model_len:
            raise InvalidRequest(
                f"the prompt has {known} tokens; with one to generate, at most {info.max_model_len} fit",
                "prompt",
                "context_length_exceeded",
            )
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            raise InvalidRequest(f"token ids must be in 0..{info.vocab_size - 1}", "prompt")

    def _keep_prompt_logprobs(self, plan: StepPlan, output: StepOutput) -> None:
        """Append what is new: after a preemption, positions come again."""
        for chunk in plan.chunks:
            entries = output.prompt_logprobs.get(chunk.seq)
            if entries:
                kept = self._prompt_logprobs.setdefault(chunk.seq, [])
                kept += entries[len(kept) - chunk.start :]

    def _delta(self, progress: Progress, output: StepOutput | None) -> Delta:
        seq = progress.seq
        first = seq.id in self._unreported
        prompt_logprobs: list[TokenLogprob | None] | None = None
        if first:
            self._unreported.discard(seq.id)
            kept = self._prompt_logprobs.pop(seq.id, None)
            if seq.request.params.prompt_logprobs is not None:
                prompt_logprobs = [None, *(kept or [])]
        if progress.finish is not None:
            del self._states[seq.id]
            self._prompt_logprobs.pop(seq.id, None)
        return Delta(
            request=seq.id,
            tokens=list(progress.tokens),
            finish=progress.finish,
            stop_token=progress.stop_token,
            logprobs=output.logprobs.get(seq.id) if output is not None and progress.tokens else None,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=max(0, seq.cached_tokens) if first else 0,
            error=progress.error,
        )
