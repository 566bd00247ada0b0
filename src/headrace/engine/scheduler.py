"""What to run in the next step: continuous batching with chunked prefill. A policy: no torch, no I/O, no clock.

Contract: `add` and `abort` at any time; `schedule` and `complete`/`abandon` alternate freely as long as every plan is
completed or abandoned exactly once, in the order they were made. Pages of a sequence never change hands while a plan
in flight holds it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

from headrace.core.config import SchedulerConfig
from headrace.core.events import FinishReason
from headrace.core.plan import Chunk, Phase, StepPlan
from headrace.core.request import ServiceClass
from headrace.engine.budget import StepBudget
from headrace.engine.outcome import Counters, LoadOrder, Progress, StepResult, split
from headrace.engine.sequence import Sequence
from headrace.engine.sequence_pages import PrefixMatch, SequencePages
from headrace.engine.waiting import WaitingQueue
from headrace.perf.step_time import StepTimeModel

LOOKAHEAD = 64

#: How many tokens of a sequence's prefix the KV store holds: a multiple of the page size, below the sequence's length.
StoredPrefix = Callable[[Sequence], int]
#: How far plans may go with a sequence that is admitted, so many of whose tokens are known; None: all the way.
Claim = Callable[[Sequence, int], int | None]
#: From which token on a stored prefix `[held, stored)` is loaded while those before it are computed; None: all of it.
MeetingPoint = Callable[[Sequence, int, int], int | None]


class Scheduler:
    """Forms step plans over one page pool.

    Decode tokens come first, then prompts under way, then new ones, each online before offline; offline work gets what
    online leaves, but makes a step that holds online tokens longer by no more than its share (`Request.share`). A
    prompt whose next pages another running sequence is computing waits for them instead of computing them again. When
    a decode token finds no page, the last in order of service gives its pages up.

    A prompt of which the store knows more than the pool is admitted with a `LoadOrder`: its pages are taken, but it is
    in no plan before `exclude` lets it. It may be admitted although the plan is full, so that its KV comes meanwhile.
    Until `loaded` says that the load has ended it can neither be preempted nor end. Where the load leaves the front of
    the prefix to compute (`MeetingPoint`), plans cover that meanwhile; the load is the sequence's `hole`.

    A sequence whose next tokens another engine is computing is admitted with a `fence` (`Claim`) that plans do not
    cross until `advance` moves it.

    Args:
        config: limits.
        pages: the pool.
        max_model_len: tokens a sequence may have.
        eos_token_ids: tokens that end a sequence.
        time_model: sizes prefill chunks for `itl_target`, and predicts; None: neither.
        stored: asked when a sequence could be admitted; None: there is no store.
        meet: asked when a sequence is admitted; None: all of a stored prefix is loaded.
        claim: asked when a sequence was admitted; None: there are no other engines.
        leave: told the id of a sequence that gives its pages back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pages: SequencePages,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        time_model: StepTimeModel | None = None,
        stored: StoredPrefix | None = None,
        meet: MeetingPoint | None = None,
        claim: Claim | None = None,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        self.counters = Counters()
        self._stored = stored
        self._meet = meet
        self._claim, self._leave = claim, leave
        self._orders: list[LoadOrder] = []
        self._config = config
        self._pages = pages
        self._max_model_len = max_model_len
        self._eos = frozenset(eos_token_ids)
        self._plans: dict[int, StepPlan] = {}
        self._next_plan = 0
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._budget = StepBudget(config, time_model)

    # -- sequences ------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> Seq[Sequence]:
        """Sequences that hold pages, in order of service."""
        return self._running

    @property
    def pages_used(self) -> int:
        """Pages that sequences hold."""
        return self._pages.used

    @property
    def sequences(self) -> Collection[Sequence]:
        """All that are not finished."""
        return self._sequences.values()

    @property
    def idle(self) -> bool:
        """True when there is nothing to do and nothing in flight."""
        return not self._sequences and not self._plans

    @property
    def online_waiting(self) -> bool:
        """True when an online sequence is in the queue."""
        return self._waiting.online

    def get(self, seq_id: str) -> Sequence:
        """The sequence with this id.

        Raises:
            KeyError: it is not known (any more).
        """
        return self._sequences[seq_id]

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. The caller made sure that it can ever fit the pool."""
        self._sequences[seq.id] = seq
        self._waiting.push(seq)

    def abort(self, seq_id: str, reason: FinishReason = "abort") -> Sequence | None:
        """End a sequence now, or as soon as its plan in flight is back.

        Returns:
            The sequence if it ended now; None if it is unknown or ends with its plan.
        """
        seq = self._sequences.get(seq_id)
        if seq is None:
            return None
        if seq.in_flight:
            seq.doomed = reason
            return None
        self._finish(seq, reason)
        return seq

    def forget_store(self) -> None:
        """There is no store any more."""
        self._stored = self._meet = self._claim = self._leave = None
        for seq in self._running:
            seq.fence = None

    def take_loads(self) -> list[LoadOrder]:
        """The loads that admissions since the last call asked for; each must end with `loaded`."""
        orders, self._orders = self._orders, []
        return orders

    def take_copies(self) -> list[tuple[int, int]]:
        """Page copies `(source, target)` that admissions since the last call count on; see `SequencePages`."""
        return self._pages.take_copies()

    def loaded(self, order: LoadOrder, tokens: int, sources: Mapping[str, int]) -> None:
        """A load has ended; nothing writes to the sequence's pages on its behalf any more.

        Args:
            order: which.
            tokens: the sequence's first so many tokens have their KV in the pool. Fewer than `order.end`: the rest is
                left to compute, and no plan in flight may hold the sequence unless it ends with that plan.
            sources: weights by which the loaded tokens are counted to their tiers.
        """
        seq = order.seq
        seq.loading = False
        if seq.hole is not None:
            seq.hole = (order.start, tokens) if tokens > order.start else None
            self._close_hole(seq)
        else:
            if tokens < order.end and not seq.in_flight:
                seq.scheduled = max(tokens, seq.computed)
            seq.computed = max(tokens, seq.computed)
        self._pages.enter(seq)
        if order.counts:
            gained = max(0, min(tokens, seq.prompt_length) - min(order.start, seq.prompt_length))
            for source, share in split(gained, sources).items():
                self._count_hit(seq, source, share)

    def advance(self, seq: Sequence, stored: int, fence: int | None) -> None:
        """More of a prefix is known: of a sequence that is neither loading nor in flight, and has come to its fence.

        Args:
            seq: which.
            stored: its first so many tokens can be loaded; not more than it has computed: nothing can.
            fence: where plans have to stop now, not before `stored`; None: nowhere.
        """
        seq.fence = fence
        if stored > seq.computed:
            self._orders.append(LoadOrder(seq, seq.computed, stored, seq.counting))
            seq.scheduled = stored
            seq.loading = True

    @property
    def correction(self) -> float:
        """What predicted times are multiplied by, as learnt from steps."""
        return self._budget.correction

    def limit_offline(self, tokens: int | None) -> None:
        """See `StepBudget.limit_offline`."""
        self._budget.limit_offline(tokens)

    def preempt_last(self) -> None:
        """Send the last in order of service back to the queue (the pool is about to shrink; nothing is in flight)."""
        self._preempt(max(self._running, key=lambda seq: seq.rank))

    # -- plans ----------------------------------------------------------------------------------------------------

    def schedule(self, exclude: frozenset[str] = frozenset()) -> StepPlan | None:
        """Form the next plan, or None when nothing can run now.

        Args:
            exclude: sequences to leave out (the caller knows why: their KV is on its way, say). Sequences whose next
                token is in flight are left out anyway.
        """
        chunks: list[Chunk] = []
        preempted: list[str] = []
        self._running.sort(key=lambda seq: seq.rank)
        budget = self._budget
        budget.begin()
        for online in (True, False):
            if not online:
                if budget.full:
                    break
                budget.begin_offline(self._offline_share())
            self._plan_decode(online, exclude, chunks, preempted)
            self._plan_prefill(online, exclude, chunks)
            if not preempted:
                self._admit(online, exclude, chunks)
        if not chunks:
            return None
        compute, memory = budget.parts()
        service: ServiceClass = "online" if any(self._sequences[chunk.seq].online for chunk in chunks) else "offline"
        plan = StepPlan(
            id=self._next_plan,
            chunks=tuple(sorted(chunks, key=lambda chunk: chunk.phase)),  # "decode" < "prefill", stable
            service=service,
            repeat=self._repeat(chunks),
            predicted_s=budget.predicted(),
            compute_s=compute,
            memory_s=memory,
            preempted=tuple(preempted),
        )
        self._next_plan += 1
        self._plans[plan.id] = plan
        return plan

    def complete(self, plan_id: int, result: StepResult) -> list[Progress]:
        """Take a plan's result; returns what became of each sequence that gained tokens or ended.

        Raises:
            KeyError: the plan is not outstanding.
        """
        plan = self._plans.pop(plan_id)
        counters = self.counters
        counters.steps += 1
        counters.step_seconds += result.seconds
        counters.attention_seconds += result.attention_s
        counters.compute_seconds += plan.compute_s
        counters.memory_seconds += plan.memory_s
        counters.computed_tokens += plan.tokens
        self._budget.observe(plan.predicted_s, result.seconds)
        self._budget.finished(plan.service == "online", result.seconds)
        progress = []
        for chunk in plan.chunks:
            seq = self._sequences[chunk.seq]
            seq.in_flight -= 1
            seq.computed = chunk.end
            self._close_hole(seq)
            self._pages.enter(seq)
            if chunk.seq in result.errors and seq.doomed is None:
                seq.doomed, seq.error = "error", result.errors[chunk.seq]
            if seq.doomed is not None:
                progress += self._end_doomed(seq)
            elif chunk.sample:
                progress.append(self._take(seq, result.tokens[chunk.seq]))
        return progress

    def abandon(self, plan_id: int) -> list[Progress]:
        """Undo a plan that was given up between layers; its work is planned again."""
        plan = self._plans.pop(plan_id)
        self.counters.abandoned += 1
        self._budget.abandoned(plan.predicted_s)
        progress = []
        for chunk in plan.chunks:
            seq = self._sequences[chunk.seq]
            seq.in_flight -= 1
            seq.scheduled = min(seq.scheduled, chunk.start)
            if seq.doomed is not None:
                progress += self._end_doomed(seq)
        return progress

    def check(self) -> None:
        """Raise AssertionError unless pages, rows and states agree; cheap enough for tests after every step."""
        self._pages.check(self._sequences.values())
        rows = sorted([*self._rows, *(seq.row for seq in self._running)])
        if rows != list(range(self._config.max_num_seqs)):
            raise AssertionError("a block-table row is lost or used twice")
        for seq in self._sequences.values():
            if not seq.computed <= seq.scheduled <= seq.length:
                raise AssertionError(f"{seq.id}: computed {seq.computed}, planned {seq.scheduled} of {seq.length}")

    def _offline_share(self) -> float:
        """By how much offline sequences may lengthen a step: what the most urgent of them says."""
        return max((seq.request.share for seq in self._sequences.values() if not seq.online), default=0.0)

    # -- forming a plan -------------------------------------------------------------------------------------------

    def _plan_decode(self, online: bool, exclude: frozenset[str], chunks: list[Chunk], preempted: list[str]) -> None:
        ready = [s for s in self._running if s.online == online and s.decoding and s.id not in exclude]
        depth = self._config.pipeline_depth
        if depth > 1:  # leave decode work for the other plans in flight
            decoding = sum(1 for s in self._running if s.online == online and s.output_length > 0)
            ready = ready[: -(-decoding // depth)]
        for seq in ready:
            if self._budget.full:
                return
            if seq.row < 0:  # preempted for an earlier one
                continue
            if not online and not self._budget.decode_fits(seq.scheduled + 1):
                return
            if self._grow(seq, seq.scheduled + 1, preempted):
                self._budget.add_decode(seq.scheduled + 1, seq.online)
                self._plan(seq, 1, chunks)

    def _plan_prefill(self, online: bool, exclude: frozenset[str], chunks: list[Chunk]) -> None:
        for seq in list(self._running):
            if self._budget.full:
                return
            if seq.online != online or seq.plannable < 1 or seq.decoding or seq.id in exclude:
                continue
            if seq.in_flight and not online:  # an offline plan may be abandoned under a later chunk
                continue
            self._prefill(seq, chunks)

    def _prefill(self, seq: Sequence, chunks: list[Chunk]) -> bool:
        length = self._budget.prefill_tokens(seq.scheduled, seq.plannable)
        if length:
            self._budget.add_prefill(seq.scheduled, length, sampled=length == seq.remaining)
            self._plan(seq, length, chunks)
        return length > 0

    def _admit(self, online: bool, exclude: frozenset[str], chunks: list[Chunk]) -> None:
        for seq in self._waiting.candidates(online, LOOKAHEAD):
            full = self._budget.full or not self._budget.prefill_tokens(0, 1)
            if full and self._stored is None:
                return
            if seq.id in exclude:
                continue
            verdict = self._try_admit(seq, only_with_load=full)
            if verdict in ("no room", "no budget"):
                return
            if verdict == "admitted" and not seq.loading and seq.plannable and not self._prefill(seq, chunks):
                return

    def _try_admit(self, seq: Sequence, only_with_load: bool) -> str:
        """Give a waiting sequence its prefix, pages for the rest of its tokens, and a row."""
        match = self._pages.match(seq)
        if match.owner is not None and (match.owner.online or not seq.online):
            return "wait for prefix"
        if only_with_load and not self._has_room(seq, match):
            return "no room"
        held = len(match.pages) * self._pages.page_size
        stored = self._stored(seq) if self._stored is not None and self._could_have_room(seq, match) else 0
        if only_with_load and stored <= held:
            return "no budget"
        if not self._make_room(seq, match):
            return "no room"
        self._pages.take(seq, match)
        if stored > held:
            start = None if self._meet is None else self._meet(seq, held, stored)
            if start is None:
                seq.scheduled = stored
            else:
                seq.hole = (start, stored)
            seq.loading = True
            self._orders.append(LoadOrder(seq, held if start is None else start, stored, seq.cached_tokens < 0))
        seq.row = self._rows.pop()
        seq.state = "running"
        self._waiting.remove(seq)
        self._running.append(seq)
        if self._claim is not None:
            seq.fence = self._claim(seq, max(held, stored))
        if stored <= held and seq.fence is None:
            held += self._pages.borrow(seq)
        if seq.cached_tokens < 0:
            seq.cached_tokens = 0
            self.counters.prompt_tokens += seq.prompt_length
            self._count_hit(seq, "pool", min(held, seq.prompt_length))
        return "admitted"

    def _close_hole(self, seq: Sequence) -> None:
        """Once a hole is loaded, and computed up to, it is none any more."""
        if seq.hole is not None and not seq.loading and seq.computed == seq.hole[0]:
            seq.computed = seq.scheduled = seq.hole[1]
            seq.hole = None

    def _count_hit(self, seq: Sequence, source: str, tokens: int) -> None:
        if tokens:
            seq.cached_tokens += tokens
            seq.cached_by_source[source] = seq.cached_by_source.get(source, 0) + tokens
            self.counters.hit_tokens += tokens
            self.counters.hits_by_source[source] = self.counters.hits_by_source.get(source, 0) + tokens

    def _make_room(self, seq: Sequence, match: PrefixMatch) -> bool:
        """See to a free row and enough pages; for an online sequence offline ones are preempted."""
        if self._has_room(seq, match):
            return True
        if not self._could_have_room(seq, match):
            return False
        victims = self._victims_of(seq)
        while victims and not self._has_room(seq, match):
            self._preempt(victims.pop())
        return self._has_room(seq, match)

    def _could_have_room(self, seq: Sequence, match: PrefixMatch) -> bool:
        """False when `_make_room` is bound to fail: not worth asking the store."""
        if self._has_room(seq, match):
            return True
        victims = self._victims_of(seq)
        reachable = self._pages.available + sum(len(victim.pages) for victim in victims)
        return bool(victims) and self._pages.wanted(seq, match) <= reachable

    def _victims_of(self, seq: Sequence) -> list[Sequence]:
        """Offline sequences that an online one may take the place of, the last in order of service at the end."""
        if not seq.online:
            return []
        return sorted((s for s in self._running if not s.online and not s.held), key=lambda s: s.rank)

    def _has_room(self, seq: Sequence, match: PrefixMatch) -> bool:
        """A free row, and pages to spare so that those running can go on for a while."""
        return bool(self._rows) and self._pages.wanted(seq, match) + len(self._running) <= self._pages.available

    def _grow(self, seq: Sequence, tokens: int, preempted: list[str]) -> bool:
        """Give a sequence pages for so many tokens, if need be at the cost of the last in order of service."""
        while self._pages.lacks(seq, tokens) > self._pages.available:
            victim = self._victim()
            if victim is None:
                return False
            self._preempt(victim)
            preempted.append(victim.id)
            if victim is seq:
                return False
        self._pages.grow(seq, tokens)
        return True

    def _victim(self) -> Sequence | None:
        """The last in order of service that no plan and no load holds; None if only one runs."""
        if len(self._running) == 1:
            return None
        return max((s for s in self._running if not s.held), key=lambda s: s.rank, default=None)

    def _plan(self, seq: Sequence, length: int, chunks: list[Chunk]) -> None:
        last = length == seq.remaining
        phase: Phase = "decode" if seq.decoding else "prefill"
        chunks.append(Chunk(seq.id, seq.scheduled, length, 1 if last else 0, phase))
        seq.scheduled += length
        seq.in_flight += 1

    def _repeat(self, chunks: list[Chunk]) -> int:
        """For how many steps the plan stays the same if nothing arrives."""
        if self._waiting or len(chunks) != len(self._running) or any(chunk.phase == "prefill" for chunk in chunks):
            return 1
        steps = 1 << 30
        for chunk in chunks:
            seq = self._sequences[chunk.seq]
            steps = min(steps, seq.max_tokens - seq.output_length, len(seq.pages) * self._pages.page_size - chunk.start)
        return max(1, steps)

    # -- after a step ---------------------------------------------------------------------------------------------

    def _take(self, seq: Sequence, tokens: Seq[int]) -> Progress:
        params = seq.request.params
        taken = []
        for token in tokens:
            seq.append(token)
            taken.append(token)
            self.counters.output_tokens += 1
            stop = token in params.stop_token_ids
            if stop or (token in self._eos and not params.ignore_eos):
                self._finish(seq, "stop")
                return Progress(seq, taken, "stop", token if stop else None)
            if seq.output_length >= seq.max_tokens or seq.length >= self._max_model_len:
                self._finish(seq, "length")
                return Progress(seq, taken, "length")
        return Progress(seq, taken)

    def _end_doomed(self, seq: Sequence) -> list[Progress]:
        """End a sequence that was aborted or failed, unless another plan still holds it."""
        if seq.in_flight or seq.doomed is None:
            return []
        self._finish(seq, seq.doomed)
        return [Progress(seq, finish=seq.doomed, error=seq.error)]

    def _preempt(self, seq: Sequence) -> None:
        self.counters.preemptions += 1
        self._release(seq)
        seq.computed = seq.scheduled = 0
        seq.hole = None
        seq.counting = False
        seq.state = "waiting"
        self._waiting.push(seq)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.state == "running":
            self._release(seq)
        else:
            self._waiting.remove(seq)
        seq.state = "finished"
        del self._sequences[seq.id]
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1

    def _release(self, seq: Sequence) -> None:
        """The one place where a sequence gives its pages and row back."""
        if seq.loading:
            raise AssertionError(f"{seq.id} gives pages back that a load still writes to")
        if self._leave is not None:
            self._leave(seq.id)
        seq.fence = None
        self._pages.give_back(seq)
        self._rows.append(seq.row)
        seq.row = -1
        self._running.remove(seq)
