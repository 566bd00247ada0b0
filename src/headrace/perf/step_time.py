"""How long a step takes, and how much prefill fits into a step of a given length."""

from dataclasses import dataclass

from headrace.perf.model_shape import ModelShape
from headrace.perf.overlap import overlapped
from headrace.perf.profile import DeviceProfile


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computes.

    Attributes:
        rows: tokens of the packed batch.
        sampled: rows that go through the head.
        kv_bytes: KV bytes that decode tokens read (`ModelShape.kv_bytes_read`, summed).
        attention_flops: FLOPs of prefill attention (`ModelShape.attention_flops`, summed).
    """

    rows: int = 0
    sampled: int = 0
    kv_bytes: int = 0
    attention_flops: int = 0

    def __add__(self, other: "StepLoad") -> "StepLoad":
        """Both in one step."""
        return StepLoad(
            self.rows + other.rows,
            self.sampled + other.sampled,
            self.kv_bytes + other.kv_bytes,
            self.attention_flops + other.attention_flops,
        )


class StepTimeModel:
    """Predicts step times from a device's profile and a model's shape.

    Linears and head take the measured GEMM rate for their rows, KV reading and element-wise traffic the measured
    bandwidths, prefill attention its rate, plus fixed overheads. Operators run one after another, so their times add
    up; where the profile overlaps, KV reading runs beside the rest as far as it says (`presets.as_run`).
    """

    def __init__(self, profile: DeviceProfile, shape: ModelShape) -> None:
        self.profile = profile
        self.shape = shape
        self._fixed = profile.step_overhead + shape.layers * profile.layer_overhead

    def decode(self, context: int) -> StepLoad:
        """The load of one decode token whose context has this many tokens, itself included."""
        return StepLoad(1, 1, self.shape.kv_bytes_read(context), 0)

    def prefill(self, start: int, length: int, sampled: int = 0) -> StepLoad:
        """The load of a prefill chunk at `start .. start+length-1`."""
        return StepLoad(length, sampled, 0, self.shape.attention_flops(start, length))

    def seconds(self, load: StepLoad) -> float:
        """Predicted time of a step; never falls when any part of the load grows."""
        if load.rows == 0:
            return 0.0
        compute, memory = self.parts(load)
        return self._fixed + overlapped(compute, memory, self.profile.overlap)

    def parts(self, load: StepLoad) -> tuple[float, float]:
        """Seconds of a step's compute-bound and of its memory-bound work, without the fixed overheads."""
        profile, shape = self.profile, self.shape
        compute = linear_seconds(shape, profile, load.rows)
        if load.sampled:
            compute += load.sampled * shape.head_flops / profile.gemm_rate(load.sampled)
        compute += load.rows * shape.activation_bytes / profile.copy
        return compute + load.attention_flops / profile.attention, load.kv_bytes / profile.kv_read

    @property
    def fixed(self) -> float:
        """Seconds of a step that do not depend on its load."""
        return self._fixed

    def prefill_that_fits(self, target: float, beside: StepLoad, start: int, most: int) -> int:
        """How many tokens of a prompt, from position `start`, fit into a step of `target` seconds.

        Args:
            target: seconds the whole step may take.
            beside: what the step computes anyway, decode tokens above all.
            start: tokens of the prompt that already have KV.
            most: tokens of the prompt that are left, or what the budget allows.

        Returns:
            The largest count in 0..most whose predicted step time stays within the target; 0 when even one token is too
            many. The last chunk of a prompt samples one row, so one is counted always: a count that fits stays fitting.
        """
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(beside + self.prefill(start, middle, sampled=1)) <= target:
                low = middle
            else:
                high = middle - 1
        return low


def linear_seconds(shape: ModelShape, profile: DeviceProfile, rows: int) -> float:
    """Time of all linears but the head over this many rows.

    The tokens of a mixture of experts spread over as many experts as their choice is expected to hit; each of these
    multiplies its own few rows, so that few tokens pay for reading the weights of many experts.
    """
    if rows == 0:
        return 0.0
    time = 2 * shape.dense_params * rows / profile.gemm_rate(rows)
    if shape.experts:
        pairs = rows * shape.experts_per_token
        each = pairs / shape.distinct_experts(rows)
        time += 2 * shape.expert_params * pairs / profile.gemm_rate(each)
    return time


class Correction:
    """Learns how far predictions are off while the engine runs: measured / predicted, smoothed.

    A profile comes from an idle machine and a few shapes; the factor absorbs what it could not know. It is bounded so
    that one stalled step does not make the scheduler timid for long.

    Attributes:
        factor: measured / predicted.
        deviation: mean absolute distance of a step's ratio from the factor.
    """

    def __init__(self, weight: float = 0.1, lowest: float = 0.25, highest: float = 4.0) -> None:
        self.factor, self.deviation = 1.0, 0.0
        self._weight, self._lowest, self._highest = weight, lowest, highest

    def observe(self, predicted: float, measured: float) -> None:
        """Take one finished step into account; `predicted` is the uncorrected prediction, both in seconds."""
        if predicted <= 0 or measured <= 0:
            return
        ratio = min(self._highest, max(self._lowest, measured / predicted))
        self.deviation += self._weight * (abs(ratio - self.factor) - self.deviation)
        self.factor += self._weight * (ratio - self.factor)

    @property
    def cautious(self) -> float:
        """A factor that most steps stay below: what a step that must meet a target is multiplied by."""
        return self.factor + self.deviation
