"""How much a step may hold: a token budget, or what the step-time model says fits into the target."""

from headrace.core.config import SchedulerConfig
from headrace.perf.step_time import Correction, StepLoad, StepTimeModel


class StepBudget:
    """Counts what a plan under construction holds and says how many prefill tokens still fit.

    With `itl_target`, prefill beside an online decode token is limited to what keeps the predicted step within the
    target; the prediction is corrected by what the steps before really took and by how much they scattered.
    """

    def __init__(self, config: SchedulerConfig, model: StepTimeModel | None) -> None:
        self._most = config.max_num_batched_tokens
        self._target = config.itl_target if model is not None else 0.0
        self._model = model
        self._correction = Correction()
        self.begin()

    def begin(self) -> None:
        """Start with an empty plan."""
        self._tokens = 0
        self._load = StepLoad()
        self._streaming = False

    @property
    def full(self) -> bool:
        """True when not one more token fits."""
        return self._tokens >= self._most

    def decode_fits(self, context: int) -> bool:
        """False when one more decode token would push a step with online tokens over the target."""
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
        if self._model is not None:
            self._load += self._model.prefill(start, length, int(sampled))

    def prefill_tokens(self, start: int, remaining: int) -> int:
        """How many of the remaining tokens of a prompt fit, from position `start`."""
        most = min(remaining, self._most - self._tokens)
        if most <= 0 or not self._target or not self._streaming or self._model is None:
            return max(0, most)
        target = self._target / self._correction.cautious
        fits = self._model.prefill_that_fits(target, self._load, start, most)
        if fits == 0 and self._load.attention_flops == 0:
            return min(most, MINIMUM_CHUNK)  # a target that cannot be met must not starve prompts
        return fits

    @property
    def correction(self) -> float:
        """What predicted times are multiplied by, as learnt from steps."""
        return self._correction.factor

    def predicted(self) -> float:
        """Predicted seconds of the plan, corrected; 0 without a model."""
        if self._model is None:
            return 0.0
        return self._model.seconds(self._load) * self._correction.factor

    def observe(self, predicted: float, measured: float) -> None:
        """Learn from a finished step; `predicted` is what `predicted()` said for it."""
        if predicted > 0:
            self._correction.observe(predicted / self._correction.factor, measured)


MINIMUM_CHUNK = 16
