"""A job run step by step on a device's profile, by the same admission code as the real thing.

Continuous batching as in `engine`: decode tokens first, then prompts in chunks up to the step's budget, in the order of
the queue; prompts share prefixes that are in the pool; when a decode token finds no room the youngest goes back to the
queue. Steps in which only decoding goes on and nothing can change are taken many at a time.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.offline.planning.admission import Admission
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.simulated_cache import SimulatedCache
from headrace.offline.planning.split import peak_tokens
from headrace.offline.planning.tree import Floats, Ints, PrefixTree
from headrace.perf.model_shape import ModelShape
from headrace.perf.overlap import overlapped
from headrace.perf.profile import DeviceProfile
from headrace.perf.step_time import linear_seconds

_MOST_STEPS = 8192  # taken at once
_RESERVE_STEPS = 16  # the same while a prompt waits for room to its end, which also comes as steps go by


@dataclass
class Run:
    """What a simulated run took.

    Attributes:
        seconds: of all steps.
        order: requests in the order they were handed over.
        handed_s: when each of them was, in seconds from the beginning.
        hit_tokens: prompt tokens that were not computed.
        computed_tokens: rows that went through the layers.
        preemptions: running requests sent back to the queue.
        step_seconds, compute, memory: float64, one per step; `compute` and `memory` are the time of each kind of work.
        rows, prefill, resident: float64, one per step: rows, those of prompts, tokens of KV held.
    """

    seconds: float = 0.0
    order: list[int] = field(default_factory=list)
    handed_s: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    step_seconds: Floats = field(default_factory=lambda: np.zeros(0))
    compute: Floats = field(default_factory=lambda: np.zeros(0))
    memory: Floats = field(default_factory=lambda: np.zeros(0))
    rows: Floats = field(default_factory=lambda: np.zeros(0))
    prefill: Floats = field(default_factory=lambda: np.zeros(0))
    resident: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def steps(self) -> int:
        """Steps taken."""
        return len(self.step_seconds)


@dataclass
class _Prompt:
    """A request whose prompt is being computed."""

    request: int
    at: int
    end: int
    produced: int


class SimulatedEngine:
    """One engine; `run` drives it with an admission policy until every request is done.

    Args:
        requests: of the job.
        lengths: int64 [n], tokens each will really produce.
        tree: of the prompts, in the pages that the engine shares.
        profile: of the device.
        model: that runs.
        kv_tokens: tokens of the pool.
        max_seqs: sequences at once.
        step_tokens: rows of a step at most.
        page: tokens of a KV page; a sequence's last one is half empty on average.
        reserve: a prompt begins only when all that run should find room to their ends (true lengths are known to it);
            else when the prompt itself fits, as engines do.
        borrowed: int64 [n], tokens that a request goes on beyond its shared pages as another one's page does, and that
            the engine copies (`borrowed_tokens`); None: it does not.
    """

    def __init__(
        self,
        requests: JobRequests,
        lengths: NDArray[np.int64],
        tree: PrefixTree,
        profile: DeviceProfile,
        model: ModelShape,
        kv_tokens: int,
        *,
        max_seqs: int = 64,
        step_tokens: int = 512,
        page: int = 16,
        reserve: bool = False,
        borrowed: NDArray[np.int64] | None = None,
    ) -> None:
        self._prompts: list[int] = requests.prompt_lengths.tolist()
        self._lengths: list[int] = np.minimum(lengths, requests.max_tokens).tolist()
        self._tree = tree
        self._profile, self._model = profile, model
        self._kv_tokens = kv_tokens
        self._max_seqs, self._step_tokens = max_seqs, max(1, step_tokens)
        self._reserve, self._waste = reserve, page // 2
        self._borrowed: list[int] = [0] * len(requests) if borrowed is None else borrowed.tolist()
        rows = range(self._step_tokens + max_seqs + 1)
        per_row = model.activation_bytes / profile.copy
        self._linear = [linear_seconds(model, profile, n) + n * per_row for n in rows]
        self._head = [n * model.head_flops / profile.gemm_rate(n) if n else 0.0 for n in rows]
        self._fixed = profile.step_overhead + model.layers * profile.layer_overhead
        self._kv_seconds = model.kv_bytes_per_token / profile.kv_read

    def run(self, admission: Admission) -> Run:
        """Run the whole job.

        Raises:
            ValueError: a request cannot fit the pool even alone.
        """
        self._cache = SimulatedCache(self._tree, self._kv_tokens)
        self._queue: deque[tuple[int, int]] = deque()  # (request, tokens produced before it was preempted)
        self._prefilling: deque[_Prompt] = deque()
        self._ids: Ints = np.zeros(0, np.int64)  # decoding, in the order they began
        self._context = np.zeros(0, np.int64)
        self._left = np.zeros(0, np.int64)
        self._own: dict[int, int] = {}  # prompt tokens each running request holds beyond its shared prefix
        self._result = Run()
        self._now = 0.0
        self._columns: list[NDArray[np.float64]] = []
        changed = True
        while True:
            if changed or admission.follows_progress:
                new = admission.admit()
                self._result.order += new
                self._result.handed_s += [self._now] * len(new)
                self._queue.extend((request, 0) for request in new)
            if not self._queue and not self._prefilling and not len(self._ids):
                break
            ended = self._step(admission)
            for request in ended:
                admission.finish(request, self._lengths[request])
            changed = bool(ended)
        return self._finished()

    def _finished(self) -> Run:
        result = self._result
        columns = np.concatenate(self._columns, axis=1) if self._columns else np.zeros((6, 0))
        (
            result.step_seconds,
            result.compute,
            result.memory,
            result.rows,
            result.prefill,
            result.resident,
        ) = columns
        result.seconds = float(columns[0].sum())
        result.computed_tokens = int(columns[3].sum())
        return result

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self, admission: Admission) -> list[int]:
        if len(self._ids):
            self._make_room()
        decoding = len(self._ids)
        most = self._step_tokens if admission.step_tokens is None else min(admission.step_tokens, self._step_tokens)
        chunks, compute = self._chunks(max(most - decoding, 0 if decoding else 1))
        prefill = sum(length for _, length in chunks)
        if not prefill and not decoding:
            raise ValueError(f"request {self._queue[0][0]} does not fit a pool of {self._kv_tokens} tokens")
        if not prefill and not (admission.follows_progress and admission.remaining):
            return self._decode_only(admission)
        sampled = decoding + sum(prompt.at == prompt.end for prompt, _ in chunks)
        compute += self._linear[decoding + prefill] + self._head[sampled]
        memory = self._read_seconds()
        seconds = self._fixed + overlapped(compute, memory, self._profile.overlap)
        held = float(self._cache.held)
        self._now += seconds
        self._columns.append(np.array([[seconds], [compute], [memory], [decoding + prefill], [prefill], [held]]))
        return self._after(chunks, admission)

    def _read_seconds(self) -> float:
        model = self._model
        if not model.window_layers:
            return float(self._context.sum()) * self._kv_seconds
        part = model.window_layers / model.layers
        slid = float(np.minimum(self._context, model.window).sum())
        return (float(self._context.sum()) * (1 - part) + slid * part) * self._kv_seconds

    def _chunks(self, budget: int) -> tuple[list[tuple[_Prompt, int]], float]:
        """Prompt chunks of this step, and the seconds of their attention."""
        chunks: list[tuple[_Prompt, int]] = []
        seconds = 0.0
        for prompt in self._prefilling:
            if budget <= 0:
                return chunks, seconds
            budget, more = self._chunk(prompt, budget, chunks)
            seconds += more
        while budget > 0 and self._queue and len(self._ids) + len(self._prefilling) < self._max_seqs:
            if not self._begin(*self._queue[0]):
                break
            self._queue.popleft()
            budget, more = self._chunk(self._prefilling[-1], budget, chunks)
            seconds += more
        return chunks, seconds

    def _chunk(self, prompt: _Prompt, budget: int, chunks: list[tuple[_Prompt, int]]) -> tuple[int, float]:
        length = min(budget, prompt.end - prompt.at)
        seconds = self._model.attention_flops(prompt.at, length) / self._profile.attention
        prompt.at += length
        chunks.append((prompt, length))
        return budget - length, seconds

    def _begin(self, request: int, produced: int) -> bool:
        """Start a request's prompt if there is room."""
        cache = self._cache
        here, missing = cache.missing(request)
        end = self._prompts[request] + produced
        shared = min(here + missing, end)
        own = end - shared + self._waste
        needed = missing + own + cache.revived(request)
        if needed > cache.room:
            return False
        if self._reserve and not self._peak_fits(request, needed, produced):
            return False
        cache.hold(request)
        cache.take(own)
        self._own[request] = own - produced
        # Whoever left the last shared page here left the one behind it too.
        at = min(here if missing else here + self._borrowed[request], end - 1)
        if not produced:
            self._result.hit_tokens += at
        self._prefilling.append(_Prompt(request, at, end, produced))
        return True

    def _peak_fits(self, request: int, needed: int, produced: int) -> bool:
        held = [self._holds(r, left) for r, left in zip(self._ids.tolist(), self._left.tolist())]
        held += [self._own[p.request] + p.produced for p in self._prefilling] + [needed]
        ahead = [self._lengths[p.request] - p.produced for p in self._prefilling]
        left = np.concatenate((self._left, ahead, [self._lengths[request] - produced]))
        shared = self._cache.held - sum(held[:-1]) - len(self._ids)  # each has taken its token of this step
        return peak_tokens(np.array(held, np.float64), left) + shared <= self._kv_tokens

    def _holds(self, request: int, left: int) -> int:
        """Tokens a decoding request holds beyond its shared prefix: its newest token has no KV yet."""
        return self._own[request] + self._lengths[request] - left - 1

    def _release(self, request: int, tokens: int) -> None:
        del self._own[request]
        self._cache.release(request, tokens)

    def _after(self, chunks: list[tuple[_Prompt, int]], admission: Admission) -> list[int]:
        """Take a step's tokens; returns the requests that ended."""
        self._context += 1
        self._left -= 1
        ended: list[int] = []
        over = self._left <= 0
        if over.any():
            ended = self._end(over)
        begun: list[_Prompt] = []
        while self._prefilling and self._prefilling[0].at == self._prefilling[0].end:
            begun.append(self._prefilling.popleft())
        for prompt in begun:
            if self._lengths[prompt.request] - prompt.produced <= 1:
                ended.append(prompt.request)
                self._release(prompt.request, self._own[prompt.request] + prompt.produced)
        on = [p for p in begun if self._lengths[p.request] - p.produced > 1]
        if on:
            self._ids = np.concatenate((self._ids, [p.request for p in on]))
            self._context = np.concatenate((self._context, [p.end + 1 for p in on]))
            self._left = np.concatenate((self._left, [self._lengths[p.request] - p.produced - 1 for p in on]))
        self._report(admission)
        return ended

    def _report(self, admission: Admission) -> None:
        if len(self._ids) and admission.remaining:
            lengths = np.fromiter((self._lengths[i] for i in self._ids.tolist()), np.int64, len(self._ids))
            admission.progress(self._ids, lengths - self._left)

    def _end(self, over: NDArray[np.bool_]) -> list[int]:
        ended: list[int] = self._ids[over].tolist()
        for request, left in zip(ended, self._left[over].tolist()):
            self._release(request, self._holds(request, left))
        keep = ~over
        self._ids, self._context, self._left = self._ids[keep], self._context[keep], self._left[keep]
        return ended

    def _make_room(self) -> None:
        """Take a token for every decoding request; the youngest goes back to the queue where there is none."""
        while self._cache.room < len(self._ids):
            self._result.preemptions += 1
            if self._prefilling:
                prompt = self._prefilling.pop()
                request, produced = prompt.request, prompt.produced
                tokens = self._own[request] + produced
            else:
                request, left = int(self._ids[-1]), int(self._left[-1])
                produced = self._lengths[request] - left
                tokens = self._holds(request, left)
                self._ids, self._context, self._left = self._ids[:-1], self._context[:-1], self._left[:-1]
            self._release(request, tokens)
            self._queue.appendleft((request, produced))
        self._cache.take(len(self._ids))

    def _decode_only(self, admission: Admission) -> list[int]:
        """As many decode steps as pass before anything can change; the first one's room is taken already."""
        decoding = len(self._ids)
        most = _RESERVE_STEPS if self._reserve and self._queue else _MOST_STEPS
        steps = int(min(self._left.min(), 1 + self._cache.room // decoding, most))
        self._cache.take((steps - 1) * decoding)
        base = self._read_seconds()
        grown = base + np.arange(steps) * decoding * self._kv_seconds
        compute = self._linear[decoding] + self._head[decoding]
        seconds = np.array(
            [self._fixed + overlapped(compute, memory, self._profile.overlap) for memory in grown.tolist()]
        )
        self._now += float(seconds.sum())
        full = np.full(steps, float(decoding))
        held = self._cache.held - np.arange(steps - 1, -1, -1.0) * decoding
        self._columns.append(np.stack((seconds, np.full(steps, compute), grown, full, np.zeros(steps), held)))
        self._context += steps
        self._left -= steps
        self._report(admission)
        over = self._left <= 0
        return self._end(over) if over.any() else []
