"""What a job is planned for."""

from dataclasses import dataclass

from headrace.perf.model_shape import ModelShape
from headrace.perf.profile import DeviceProfile


@dataclass(frozen=True)
class Target:
    """An engine in numbers.

    Attributes:
        profile: of the device.
        model: that runs.
        kv_tokens: tokens of the KV pool.
        max_seqs: sequences at once.
        step_tokens: tokens of a step at most.
    """

    profile: DeviceProfile
    model: ModelShape
    kv_tokens: int
    max_seqs: int = 64
    step_tokens: int = 512
