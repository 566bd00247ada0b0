"""Dual scan: requests from both ends of the density order, so that what runs together has the density of what is left.

The order (`tree_order`) has compute-heavy subtrees at its left end and memory-heavy ones at its right. Two cursors move
towards each other. The right side fills its part of the KV memory with long-lived requests; the left side fills the
rest with short-lived ones, on a device that overlaps both kinds of work at such a pace that each step computes in
proportion to what it reads. Densities and shares are of what is left to do, computed anew at each call, so that wrong
estimates correct themselves: an early end admits more, an answer that goes on for too long counts to the right.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.offline.planning.lengths import SMALL, LengthEstimator
from headrace.offline.planning.prefixes import HeldPrefixes
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.scan import LEFT, RIGHT, Scan, pulled, ratio
from headrace.offline.planning.split import memory_split, peak_tokens
from headrace.offline.planning.tree import Ints, PrefixTree
from headrace.offline.planning.tree_order import order_by_density
from headrace.perf.density import ROWS, CostRates
from headrace.perf.model_shape import ModelShape
from headrace.perf.overlap import even_mix
from headrace.perf.profile import DeviceProfile

#: Tokens of a KV page: prefixes are shared in whole pages, and a sequence wastes half a page on average.
PAGE = 16
#: A left request that has produced so many times its estimate counts to the right side.
_UNDERESTIMATED = 2.0
#: The longest request should be done when all are: memory is given to as few at once as that takes, and this much more.
_HORIZON = 1.1
#: What one end of a request tells of its group is acted on at once when so much of the waiting work is of the group.
_WEIGHTY = 0.05
#: Compute work is spent so much more slowly than estimates say, so that some is left beside the last long answers.
_DOUBT = 1.5
#: Compute work is spent at least at so much of the pace at which it would end with the memory work (own).
_PACE = 0.6
#: Standard deviation of an estimated length over its mean (own): so much of what runs together is kept free.
_UNKNOWN = 0.4


class BlendAdmission:
    """The policy; see `Admission` for its contract.

    Args:
        requests: of the job.
        profile: of the device.
        model: that runs.
        kv_tokens: tokens of the KV pool.
        seed: of the sample.
        lengths: output lengths where known; None: estimated.
        max_seqs: sequences the engine runs at once.
        step_tokens: tokens of one engine step at most.
        part: which of the requests it is to admit; None: all.
    """

    def __init__(
        self,
        requests: JobRequests,
        profile: DeviceProfile,
        model: ModelShape,
        kv_tokens: int,
        seed: int = 0,
        lengths: NDArray[np.int64] | None = None,
        max_seqs: int = 64,
        step_tokens: int = 512,
        part: NDArray[np.bool_] | None = None,
    ) -> None:
        self._requests = requests
        self._prompts = requests.prompt_lengths.astype(np.float64)
        self._rates = CostRates.of(profile, model, max(1, min(step_tokens, ROWS)))
        self._kv = float(kv_tokens)
        self._max_seqs = max_seqs + max(2, max_seqs // 8)  # a few wait in the engine, so that no row stays free
        self._step_tokens = step_tokens
        self._overlap = bool(profile.overlap)
        self._even_mix = even_mix(profile.overlap)
        #: Rows that a step computes in the time that reading the weights takes anyway.
        self._free_rows = self._rates_floor(profile)
        self._tree = PrefixTree.of(requests, PAGE)
        self._estimator = LengthEstimator(requests, self._tree, lengths)
        self._known = lengths is not None
        count = len(requests)
        self._own = np.ones(count, bool) if part is None else part.copy()
        self._waiting = self._own.copy()
        self._remaining = int(self._waiting.sum())
        self._output = np.ones(count)  # estimated output tokens
        self._produced = np.zeros(count)
        self._prefixes = HeldPrefixes(self._tree, self._prompts)
        self._unique = self._prefixes.unique
        self._top = np.full(count, -1, np.int64)  # the subtree below the root that each is in
        self._top[self._tree.leaves] = self._tree.top()
        self._last = [-2, -2]  # the subtree that each side works on
        self._side = np.zeros(count, np.int8)
        self._under_way: dict[int, None] = {}
        self._reports = False  # whether progress is ever told
        self._finished = 0
        self._replan_at = 0
        self._step_rows: int | None = None
        #: Small subtrees of which the warm-up computes the prefix.
        self._warm = np.zeros(len(self._tree.parent), bool)
        sample = self._estimator.sample(seed)
        self._sample: list[int] = sample[self._own[sample]].tolist()[::-1]
        tops = self._top[self._sample]
        size = self._tree.last - self._tree.first
        self._warm[tops[(tops >= 0) & (size[tops] < SMALL)]] = True
        #: Requests that a plan moved away from their prefix, by the last plan.
        self.split = 0
        #: Requests of the warm-up.
        self.sampled = len(self._sample)
        self._plan()

    # -- the contract ---------------------------------------------------------------------------------------------

    @property
    def remaining(self) -> int:
        """Requests not admitted yet."""
        return self._remaining

    @property
    def follows_progress(self) -> bool:
        """True where the left side is paced by what runs."""
        return self._overlap and self._remaining > 0

    @property
    def step_tokens(self) -> int | None:
        """Where the left side is paced: the rows that give a step its share of compute."""
        return self._step_rows

    def progress(self, requests: NDArray[np.int64], output_tokens: NDArray[np.int64]) -> None:
        """Take running requests' tokens into account."""
        self._reports = True
        self._produced[requests] = output_tokens
        late = requests[output_tokens >= self._output[requests]]
        if len(late):
            self._estimator.progress(late, self._produced[late].astype(np.int64))
            self._outlived(late)

    def finish(self, request: int, output_tokens: int) -> None:
        """Take a request's end into account; plan anew when enough has been learnt."""
        del self._under_way[request]
        self._prefixes.release(request)
        telling = self._estimator.observe(request, output_tokens)
        self._finished += 1
        if self._known or not self._remaining:
            return
        if self._finished >= self._replan_at or (telling and self._weighs(request)):
            self._estimator.progress(*self._running())
            self._plan()

    def withdraw(self, requests: Ints) -> None:
        """See `Admission.withdraw`."""
        self._own[requests] = self._waiting[requests] = False
        self._remaining -= len(requests)
        self._waiting_compute -= float(self._compute[requests].sum())
        self._waiting_memory -= float(self._memory[requests].sum())
        self._waiting_area -= float(self._area[requests].sum())

    def extend(self, requests: Ints) -> None:
        """See `Admission.extend`."""
        self._own[requests] = self._waiting[requests] = True
        self._remaining += len(requests)
        self._estimator.progress(*self._running())
        self._plan()

    def learn(self, request: int, output_tokens: int) -> None:
        """See `Admission.learn`; it counts when plans are made anew."""
        self._estimator.observe(request, output_tokens)

    def admit(self) -> list[int]:
        """Requests that fit now: samples first, then from the side that is under its share."""
        taken: list[int] = []
        while self._sample and len(self._under_way) < self._max_seqs:
            sample = self._sample[-1]
            if self._waiting[sample]:
                if self._under_way and not self._fits(sample):
                    break
                self._take(sample, self._usual_side(sample), taken)
            self._sample.pop()
        self._step_rows = None
        if not self._remaining:
            return taken
        state = _State(self)
        self._step_rows = state.step_rows
        while self._remaining and len(self._under_way) < self._max_seqs:
            self._scan.skip_taken()
            request = state.next()
            if request is None:
                break
            self._take(request, state.side, taken)
            state.took(request)
        if not self._under_way:  # nothing fits an empty pool: the engine shall judge
            self._scan.skip_taken()
            self._take(self._scan.end(LEFT), LEFT, taken)
        return taken

    # -- planning -------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Estimate lengths and order what is left by density."""
        self._output = self._estimator.estimate()
        compute = self._rates.compute(self._prompts, self._output)
        memory = self._rates.memory(self._prompts, self._output)
        order = order_by_density(self._tree, compute, memory, self._rates)
        self.split = len(order.split)
        kept = np.flatnonzero(self._waiting[order.requests])
        kept = kept[
            np.argsort(
                pulled(self._top[order.requests[kept]], (self._last[LEFT], self._last[RIGHT]), self._warm),
                kind="stable",
            )
        ]
        self._scan = Scan(order.requests[kept], order.compute[kept], order.memory[kept], self._waiting)
        self._compute = np.empty(len(order.requests))
        self._compute[order.requests] = order.compute
        self._memory = memory
        area = self._prompts * self._output + self._output**2 / 2
        self._area = area
        self._waiting_compute = float(self._compute[self._waiting].sum())
        self._waiting_memory = float(memory[self._waiting].sum())
        self._waiting_area = float(area[self._waiting].sum())
        step = max(16, self._finished // 2)
        self._replan_at = self._finished + min(step, max(16, len(self._waiting) // 20))

    def _rates_floor(self, profile: DeviceProfile) -> float:
        """Rows whose linears take as long as those of one row."""
        shape = self._rates.shape
        one = shape.linear_flops / profile.gemm_rate(1)
        return max(1.0, one / self._rates.linear)

    def _weighs(self, request: int) -> bool:
        """Whether much of what waits is of this request's group."""
        alike = self._waiting & (self._requests.groups == self._requests.groups[request])
        work = float(self._memory[alike].sum()), float(self._compute[alike].sum())
        return work[0] > _WEIGHTY * self._waiting_memory or work[1] > _WEIGHTY * self._waiting_compute

    def _running(self) -> tuple[Ints, Ints]:
        ids = np.fromiter(self._under_way, np.int64, len(self._under_way))
        return ids, self._produced[ids].astype(np.int64)

    def _outlived(self, late: Ints) -> None:
        """Running requests that go on past their estimate: what they need is thought anew, and where they count."""
        limits = self._requests.max_tokens[late]
        first = self._output[late]
        self._output[late] = np.minimum(np.maximum(1.25 * self._produced[late], self._produced[late] + 1), limits)
        self._area[late] = self._prompts[late] * self._output[late] + self._output[late] ** 2 / 2
        badly = self._produced[late] >= _UNDERESTIMATED * np.maximum(first / 1.25, PAGE)
        self._side[late[badly]] = RIGHT

    def _usual_side(self, request: int) -> int:
        """The side that a sample counts to: that of its half of the density order."""
        whole = self._waiting_compute * self._memory[request] <= self._waiting_memory * self._compute[request]
        return LEFT if whole else RIGHT

    # -- taking ---------------------------------------------------------------------------------------------------

    def _take(self, request: int, side: int, taken: list[int]) -> None:
        self._waiting[request] = False
        self._remaining -= 1
        self._side[request] = side
        self._under_way[request] = None
        self._prefixes.hold(request)
        self._waiting_compute -= self._compute[request]
        self._waiting_memory -= self._memory[request]
        self._waiting_area -= self._area[request]
        taken.append(request)

    def _fits(self, request: int) -> bool:
        """Whether a request fits beside all that runs, none of which is done before it."""
        ids = np.fromiter((*self._under_way, request), np.int64, len(self._under_way) + 1)
        current = self._unique[ids] + self._produced[ids] + PAGE / 2
        ahead = np.maximum(self._output[ids] - self._produced[ids], 0)
        return peak_tokens(current, ahead, self._output[request]) <= self.room(request)

    def room(self, request: int) -> float:
        """Tokens of the pool beside the shared prefixes, were this request to begin."""
        return self._kv - self._prefixes.tokens - self._prefixes.missing(request)


class _State:
    """What runs and what is left, summed up once per `admit` and kept up to date while it takes.

    A part of `BlendAdmission`: reads its columns.
    """

    def __init__(self, plan: BlendAdmission) -> None:
        self.plan = plan
        self.side = LEFT
        rates = plan._rates
        ids = np.fromiter(plan._under_way, np.int64, len(plan._under_way))
        produced, output = plan._produced[ids], plan._output[ids]
        self._held = plan._unique[ids] + produced + PAGE / 2
        self._ahead = np.maximum(output - produced, 0.0)
        self._spread = float(((_UNKNOWN * output) ** 2).sum())  # variance of what all will hold
        right = plan._side[ids] == RIGHT
        usual = plan._unique[ids] + output / 2  # what a request holds on average
        self._used = [float(usual[~right].sum()), float(usual[right].sum())]
        begun = produced > 0
        self._pending = float(plan._unique[ids][~begun].sum())
        read = float((plan._prompts[ids] + produced)[begun].sum()) * rates.kv
        area = plan._area[ids] - plan._prompts[ids] * produced - produced**2 / 2
        self._area = plan._waiting_area + float(np.maximum(area, 0).sum())
        memory = plan._waiting_memory + float(np.maximum(area, 0).sum()) * rates.kv
        compute = plan._waiting_compute + (float(self._ahead.sum()) + self._pending) * rates.linear
        self._density = ratio(compute, memory)
        self._longest = float(self._ahead.max(initial=0.0))
        self._paced = plan._overlap and plan._reports
        # A mix that is even on the device is as fast as the density of the whole where that is above it, and needs no
        # knowledge of lengths; the density makes steps alike to the end.
        doubt = 1.0 if plan._known else _DOUBT
        believed = self._density / doubt
        mix = max(believed, plan._even_mix)
        decoding = float(begun.sum())
        # That proportion alone holds at any pace, however slow. So it is at least a part of that at which compute work
        # ends when memory work can: after the steps that read all with a full pool, or after the longest answer.
        steps = max(self._area / plan._kv, self._longest, 1.0)
        pace = _PACE / doubt * compute / rates.linear / steps
        rows = min(float(plan._step_tokens), max(mix * read / rates.linear, pace, plan._free_rows, decoding + 1))
        self._mix = mix
        self._pace = rows - decoding if self._paced else np.inf
        self.step_rows = int(np.ceil(rows)) if self._paced else None

    def next(self) -> int | None:
        """The request to take now, with `side` set; None when no side that is under its share has room."""
        lacking = [share - used for share, used in zip(self._shares(), self._used)]
        for side in (LEFT, RIGHT) if lacking[LEFT] > lacking[RIGHT] else (RIGHT, LEFT):
            if not self._may(side, lacking[side]):
                continue
            # What the left side lacks of its share is kept for it.
            kept = max(0.0, lacking[LEFT]) if side == RIGHT else 0.0
            for request in self.plan._scan.ahead(side):
                if self._fits(request, kept):
                    self.side = side
                    return request
        return None

    def took(self, request: int) -> None:
        """Count what was just taken."""
        plan = self.plan
        unique, output = plan._unique[request], plan._output[request]
        self._pending += unique
        self._held = np.append(self._held, unique + PAGE / 2)
        self._ahead = np.append(self._ahead, output)
        self._used[self.side] += unique + output / 2
        self._spread += (_UNKNOWN * output) ** 2
        plan._last[self.side] = int(plan._top[request])

    def _may(self, side: int, lacking: float) -> bool:
        if side == LEFT and self._paced:
            return self._pending < self._pace
        if side == RIGHT and self._paced and self._at_right > self._mix:
            return False  # nothing memory-heavy is left: what stands there is taken from the left, at its pace
        return lacking > 0

    def _fits(self, request: int, kept: float) -> bool:
        plan = self.plan
        output = plan._output[request]
        held, ahead = np.append(self._held, plan._unique[request] + PAGE / 2), np.append(self._ahead, output)
        # What becomes of the others after its end is none of its doing.
        spread = 0.0 if plan._known else (self._spread + (_UNKNOWN * output) ** 2) ** 0.5
        return peak_tokens(held, ahead, output) + kept + spread <= plan.room(request)

    def _shares(self) -> tuple[float, float]:
        """Tokens of memory for each side."""
        plan = self.plan
        memory = plan._kv - plan._prefixes.tokens
        at_left, self._at_right = plan._scan.densities()
        left, right = memory_split(memory, at_left, self._at_right, self._density)
        if not self._paced:
            return left, right
        output = float(plan._output[plan._scan.left_window()].mean())
        left = min(memory / 2, max(left, self._pace * (output + 2)))  # prompts at that pace, until their answers end
        longest = max(self._longest, plan._output[plan._scan.end(RIGHT)])
        if not plan._known:  # nobody knows which of them is long: the sooner all have begun the better
            return left, memory - left
        spread = self._area / (_HORIZON * longest)
        floor = plan._free_rows * plan._rates.linear / (max(self._density, 0.1) * plan._rates.kv)
        return left, min(memory - left, max(spread, floor))
