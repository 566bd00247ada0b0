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
from headrace.engine.store_flow import Arrival, StoreFlow

#: A step that can run nothing because KV is on its way returns after this long at the latest, so that whoever drives
#: the engine can bring arrivals and aborts.
REST_SECONDS = 0.005
#: Sequences whose load will be over within this share of a step may be in it: the layers come in time.
SOON = 0.5
#: At the end, what waits to be written may take this long.
FLUSH_SECONDS = 5.0


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
        self._flow = parts.flow
        self._step_seconds = 0.0
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
        if self._flow is not None and request_id in self._scheduler and not self._scheduler.get(request_id).in_flight:
            self._arrive(self._flow.cancel(request_id))
        seq = self._scheduler.abort(request_id)
        if seq is not None:
            self._ended.append(self._delta(Progress(seq, finish="abort"), None))

    def limit_offline(self, tokens: int | None) -> None:
        """From the next step on, offline prompts fill steps up to so many tokens only; None: as far as they go."""
        self._scheduler.limit_offline(tokens)

    def step(self, interrupt: Callable[[], bool] | None = None) -> list[Delta]:
        """Fill the plans in flight, finish the oldest, and report what became of its sequences.

        Sequences whose stored KV is on its way are left out while others can run and their KV will not have come in
        time. When nothing else can run they are planned as soon as the first layer of one of them is there: the forward
        pass then follows the load, layer by layer.

        Args:
            interrupt: asked between layers of a step that is all offline; it may `add` and `abort`, and returns True
                when the step should be given up for online work.
        """
        flow, depth = self._flow, self._config.scheduler.pipeline_depth
        if flow is not None:
            self._arrive(flow.settle())
        while len(self._runner) < depth:
            plan = self._plan() if flow is None else self._schedule(flow)
            if plan is None:
                break
            sequences = [self._scheduler.get(chunk.seq) for chunk in plan.chunks]
            if flow is None:
                self._runner.submit(plan, sequences)
            else:
                flow.forward(True)
                self._runner.submit(plan, sequences, flow.begin(plan, sequences))
        deltas, self._ended = self._ended, []
        if not len(self._runner):
            if flow is not None and not deltas and len(self._scheduler):
                self._wait_for_pages_or_loads(flow)
            return deltas
        output = self._runner.collect(self._states.__getitem__, interrupt)
        if flow is not None:
            flow.forward(False)
        progress = self._take(output)
        deltas += self._ended
        self._ended = []
        deltas += [self._delta(item, output) for item in progress]
        return deltas

    def _plan(self, exclude: frozenset[str] = frozenset()) -> StepPlan | None:
        """The next plan, with the KV in place that its admissions count on."""
        plan = self._scheduler.schedule(exclude)
        copies = self._scheduler.take_copies()
        if copies:
            self._parts.group.copy(copies)
        return plan

    def _schedule(self, flow: StoreFlow) -> StepPlan | None:
        """The next plan; loads that admissions ask for are begun."""
        flow.hand_over()
        for seq, stored, fence in flow.look():
            self._scheduler.advance(seq, stored, fence)
        plan = self._plan(flow.absent(SOON * self._step_seconds))
        flow.start(self._scheduler.take_loads())
        if not self._config.store.load_overlap:
            self._end_loads(flow)
            plan = plan or self._plan()
            flow.start(self._scheduler.take_loads())
            self._end_loads(flow)
        if plan is None and flow.loading and not len(self._runner):
            plan = self._plan(flow.not_begun())
            flow.start(self._scheduler.take_loads())
        return plan

    def _end_loads(self, flow: StoreFlow) -> None:
        """Return when no load is under way."""
        while flow.loading:
            flow.rest(REST_SECONDS)
            self._arrive(flow.settle())

    def _wait_for_pages_or_loads(self, flow: StoreFlow) -> None:
        """Nothing can run now although there is work."""
        if flow.loading or flow.waiting or flow.reclaim():
            flow.rest(REST_SECONDS)

    def _take(self, output: StepOutput) -> list[Progress]:
        """What became of the sequences of a plan that is done, or given up with those after it."""
        scheduler, flow = self._scheduler, self._flow
        if output.result is not None:
            self._keep_prompt_logprobs(output.plan, output)
            self._step_seconds = output.result.seconds
            if flow is not None:
                self._arrive(flow.complete(output.plan, scheduler.get))
            return scheduler.complete(output.plan.id, output.result)
        plans = (output.plan, *output.given_up)
        if flow is not None:
            for plan in plans:
                self._arrive(flow.give_up(plan, scheduler.get))
        return [item for plan in plans for item in scheduler.abandon(plan.id)]

    def _arrive(self, arrivals: list[Arrival]) -> None:
        for order, tokens, sources in arrivals:
            self._scheduler.loaded(order, tokens, sources)

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        counters, allocator, flow = self._scheduler.counters, self._parts.group.allocator, self._flow
        store, tiers = flow.stats(self.idle) if flow is not None else ({}, {})
        return EngineStats(
            waiting=self._scheduler.waiting,
            running=len(self._scheduler.running),
            pages_total=allocator.total,
            pages_used=self._scheduler.pages_used,
            prompt_tokens_total=counters.prompt_tokens,
            hit_tokens_total=counters.hit_tokens,
            computed_tokens_total=counters.computed_tokens,
            output_tokens_total=counters.output_tokens,
            preemptions_total=counters.preemptions,
            abandoned_total=counters.abandoned,
            steps_total=counters.steps,
            step_seconds_total=counters.step_seconds,
            compute_seconds_total=counters.compute_seconds,
            memory_seconds_total=counters.memory_seconds,
            attention_seconds_total=counters.attention_seconds,
            requests_total=dict(counters.finished),
            hit_tokens_by_source=dict(counters.hits_by_source),
            loads_total=flow.loads.started if flow is not None else 0,
            loads_failed_total=flow.loads.failed if flow is not None else 0,
            load_wait_seconds_total=flow.loads.waited if flow is not None else 0.0,
            store=store,
            store_tiers=tiers,
        )

    @property
    def online_waiting(self) -> bool:
        """True when an online request is in the queue, or its KV has come: a reason to give up an offline step."""
        return self._scheduler.online_waiting or (self._flow is not None and self._flow.loads.online_come)

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
        if self._flow is not None:
            self._arrive(self._flow.clear())
        while group.allocator.used > pages:
            scheduler.preempt_last()
        group.resize(pages, scheduler.running)
        self._runner.pages_moved()

    def close(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Let go of the store, once what waits to be written is, or `timeout` seconds have passed.

        Nothing may be in flight. The engine goes on without a store; a second call does nothing.

        Returns:
            False when time was too short.
        """
        flow, self._flow = self._flow, None
        if flow is None:
            return True
        self._scheduler.forget_store()
        for arrival in flow.clear_loads():
            self._arrive([arrival])
        return flow.close(timeout)

    def check(self) -> None:
        """Raise AssertionError unless pages, rows, loads and states agree (for tests)."""
        self._scheduler.check()
        if self._flow is not None:
            self._flow.check(self._scheduler.sequences)
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
            if self._flow is not None:
                self._flow.forget(seq.id)
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
            cached_by_source=seq.cached_by_source if first and seq.cached_by_source else None,
        )
