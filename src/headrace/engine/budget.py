"""How much a step may hold: a token budget, or what the step-time model says fits into the target."""

import math

from headrace.core.config import SchedulerConfig
from headrace.perf.step_time import Correction, StepLoad, StepTimeModel


class StepBudget:
    """Counts what a plan under construction holds and says how many prefill tokens still fit.

    With `itl_target`, prefill beside an online decode token is limited to what keeps the predicted step within the
    target; the prediction is corrected by what the steps before really took and by how much they scattered.

    Offline tokens may make a step that holds online ones longer by a share of its predicted time (`begin_offline`). A
    step of offline tokens alone is given up when online work comes, so prompts in it are cut to a part of the time that
    online requests usually leave.
    """

    def __init__(self, config: SchedulerConfig, model: StepTimeModel | None) -> None:
        self._most = config.max_num_batched_tokens
        self._target = config.itl_target if model is not None else 0.0
        self._model = model
        self._correction = Correction()
        self._gaps = Gaps()
        self._online_busy = 0.0
        self._offline_most: int | None = None
        self.begin()

    def limit_offline(self, tokens: int | None) -> None:
        """Prompts of offline sequences fill steps up to so many tokens only; None: as far as they go.

        What plans a whole job knows how much of both kinds of work each step should hold (`Admission.step_tokens`).
        """
        self._offline_most = tokens

    def begin(self) -> None:
        """Start with an empty plan."""
        self._tokens = 0
        self._load = StepLoad()
        self._streaming = False
        self._offline = False
        self._offline_prefill = 0
        self._most_seconds = 0.0
        self._most_tokens = 0

    def begin_offline(self, share: float) -> None:
        """What is asked for from here on is for offline sequences.

        Args:
            share: by which they may make the step longer, if there is anything in it by now. The busier online requests
                keep the engine the less of it counts: what lengthens every step then makes requests queue.
        """
        self._offline = True
        share *= 1 - BUSY_WEIGHT * self._online_busy
        if self._tokens:
            self._most_tokens = self._tokens + max(1, int(self._tokens * share))
            if self._model is not None:
                self._most_seconds = self._model.seconds(self._load) * (1 + share)

    def finished(self, online: bool, seconds: float) -> None:
        """A step was done, with online tokens or without."""
        kept = math.exp(-seconds / BUSY_SECONDS)
        self._online_busy = kept * self._online_busy + (1 - kept) * online
        self._gaps.step(online, seconds)

    def abandoned(self, predicted: float) -> None:
        """A step of offline tokens alone, of so many predicted seconds, was given up."""
        self._gaps.given_up(predicted)

    @property
    def full(self) -> bool:
        """True when not one more token fits."""
        return self._tokens >= self._most

    def decode_fits(self, context: int) -> bool:
        """False when one more offline decode token would push a step with online tokens over a limit."""
        if self._most_tokens and self._model is None:
            return self._tokens < self._most_tokens
        if self._most_seconds and self._model is not None:
            return self._model.seconds(self._load + self._model.decode(context)) <= self._limit_seconds()
        if not self._target or not self._streaming or self._model is None:
            return True
        predicted = self._model.seconds(self._load + self._model.decode(context))
        return predicted * self._correction.cautious <= self._target

    def add_decode(self, context: int, online: bool) -> None:
        """Count a decode token whose context, itself included, has so many tokens."""
        self._tokens += 1
        self._streaming = self._streaming or online
        if self._model is not None:
            self._load += self._model.decode(context)

    def add_prefill(self, start: int, length: int, sampled: bool) -> None:
        """Count a prefill chunk."""
        self._tokens += length
        if self._offline:
            self._offline_prefill += length
        if self._model is not None:
            self._load += self._model.prefill(start, length, int(sampled))

    def prefill_tokens(self, start: int, remaining: int) -> int:
        """How many of the remaining tokens of a prompt fit, from position `start`."""
        most = min(remaining, self._most - self._tokens)
        if self._offline:
            if self._offline_most is not None:
                most = min(most, max(0, self._offline_most - self._tokens))
            if self._most_tokens and self._model is None:
                return max(0, min(most, self._most_tokens - self._tokens))
            if self._most_seconds and self._model is not None and most > 0:
                return self._model.prefill_that_fits(self._limit_seconds(), self._load, start, most)
            return self._between_online_steps(start, most)
        if most <= 0 or not self._target or not self._streaming or self._model is None:
            return max(0, most)
        target = self._target / self._correction.cautious
        fits = self._model.prefill_that_fits(target, self._load, start, most)
        if fits == 0 and self._load.attention_flops == 0:
            return min(most, MINIMUM_CHUNK)  # a target that cannot be met must not starve prompts
        return fits

    def _between_online_steps(self, start: int, most: int) -> int:
        """Tokens of a prompt for a step without online tokens: it should be done before the next of them come."""
        room = self._gaps.room
        if self._model is None or math.isinf(room) or most <= 0:
            return max(0, most)
        fits = self._model.prefill_that_fits(room / GAP_PARTS / self._correction.factor, self._load, start, most)
        return max(fits, min(most, MINIMUM_CHUNK - self._offline_prefill), 0)

    def _limit_seconds(self) -> float:
        """The longest a step with online tokens may be for the sake of offline ones, uncorrected."""
        if not self._target or not self._streaming:
            return self._most_seconds
        return min(self._most_seconds, self._target / self._correction.cautious)

    @property
    def correction(self) -> float:
        """What predicted times are multiplied by, as learnt from steps."""
        return self._correction.factor

    def predicted(self) -> float:
        """Predicted seconds of the plan, corrected; 0 without a model."""
        if self._model is None:
            return 0.0
        return self._model.seconds(self._load) * self._correction.factor

    def parts(self) -> tuple[float, float]:
        """Seconds of the plan's compute-bound and memory-bound work by the profile, uncorrected; 0 without a model."""
        return (0.0, 0.0) if self._model is None else self._model.parts(self._load)

    def observe(self, predicted: float, measured: float) -> None:
        """Learn from a finished step; `predicted` is what `predicted()` said for it."""
        if predicted > 0:
            self._correction.observe(predicted / self._correction.factor, measured)


class Gaps:
    """How long online requests leave the engine to others: the usual length of what lies between their steps."""

    def __init__(self) -> None:
        self._usual = math.inf
        self._now = 0.0

    def step(self, online: bool, seconds: float) -> None:
        """A step was done."""
        if not online:
            self._now += seconds
        elif self._now:
            self._close()

    def given_up(self, seconds: float) -> None:
        """A step that would have taken so long was given up, half way on average."""
        self._now += seconds / 2
        self._close()

    @property
    def room(self) -> float:
        """Seconds, inf before any online request: the usual, or what has gone by already where that is more."""
        return max(self._usual, self._now)

    def _close(self) -> None:
        self._usual = self._now if math.isinf(self._usual) else self._usual + GAP_WEIGHT * (self._now - self._usual)
        self._now = 0.0


MINIMUM_CHUNK = 16
#: A step between online ones should take this part of the time there usually is: what is given up is half a step.
GAP_PARTS = 4
GAP_WEIGHT = 0.3
#: How much of the share goes where online requests leave the engine no time; how far back that is looked at.
BUSY_WEIGHT, BUSY_SECONDS = 0.75, 10.0
