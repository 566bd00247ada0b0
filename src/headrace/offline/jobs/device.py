"""What a job knows of the engine that it runs on: enough to order its requests and to predict its end."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.events import EngineInfo
from headrace.offline.jobs.optimum import Optimum, optimum_of
from headrace.offline.planning.admission import ORDERS, Admission, make_admission
from headrace.offline.planning.requests import JobRequests
from headrace.perf.model_config import shape_of_folder
from headrace.perf.model_shape import ModelShape
from headrace.perf.profile import DeviceProfile, load_or_default

#: Makes the policy that orders the requests of a job.
Orders = Callable[[JobRequests], Admission]


@dataclass(frozen=True)
class JobDevice:
    """An engine in numbers.

    Attributes:
        profile: of its device.
        shape: of its model.
        kv_tokens: that its KV pool holds.
        max_seqs: sequences that it runs at once.
        step_tokens: tokens of a step at most.
        window: requests of a job in flight at most: enough to choose from, and half of the queue is left to others.
    """

    profile: DeviceProfile
    shape: ModelShape
    kv_tokens: int
    max_seqs: int
    step_tokens: int
    window: int

    def orders(self, order: str) -> Orders:
        """What makes the admission policy of a job.

        Raises:
            ConfigError: there is no such order.
        """
        check_order(order)
        return lambda requests: make_admission(
            order,
            requests,
            self.profile,
            self.shape,
            self.kv_tokens,
            max_seqs=self.max_seqs,
            step_tokens=self.step_tokens,
        )

    def optimum(self, requests: JobRequests) -> Optimum | None:
        """What the requests take at best; None where there are too many to say, or nobody measured the device."""
        return None if not self.profile.measured else optimum_of(requests, self.profile, self.shape, self.step_tokens)


def device_of(info: EngineInfo, config: EngineConfig) -> JobDevice:
    """The numbers of a ready engine.

    Raises:
        ConfigError: the device's profile is broken.
        ModelError: the model's configuration lacks a number.
    """
    limits = config.scheduler
    threads = config.model.threads if info.device == "cpu" else 0
    return JobDevice(
        profile=load_or_default(info.device, threads, info.dtype),
        shape=shape_of_folder(Path(info.path), info.dtype),
        kv_tokens=info.pages * info.page_size,
        max_seqs=limits.max_num_seqs,
        step_tokens=limits.max_num_batched_tokens,
        window=max(1, min(4 * limits.max_num_seqs, limits.max_queue // 2)),
    )


def check_order(order: str) -> None:
    """Raise `ConfigError` for an order that there is none of."""
    if order not in ORDERS:
        raise ConfigError(f"--order: {order!r} is not one of {', '.join(ORDERS)}")
