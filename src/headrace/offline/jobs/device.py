"""What a job knows of the engine that it runs on: enough to order its requests and to predict its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.config import EngineConfig
from headrace.core.events import EngineInfo
from headrace.offline.jobs.optimum import Optimum
from headrace.offline.planning.admission import check_order
from headrace.offline.planning.fleet import Fleet
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.target import Target
from headrace.perf.model_config import shape_of_folder
from headrace.perf.presets import as_run
from headrace.perf.profile import load_or_default

#: Makes the policy that hands a job's requests to its workers.
Orders = Callable[[JobRequests], Fleet]


@dataclass(frozen=True)
class JobDevice:
    """An engine in numbers.

    Attributes:
        target: what its part of a job is planned for.
        window: requests of a job in flight at most: enough to choose from, and half of the queue is left to others.
    """

    target: Target
    window: int

    def optimum(self, requests: JobRequests) -> Optimum | None:
        """What the requests take at best; None where nobody measured the device."""
        target = self.target
        if not target.profile.measured or not len(requests):
            return None
        return Optimum(requests, target.profile, target.model, target.step_tokens)


def fleet_of(order: str, devices: Sequence[JobDevice]) -> Orders:
    """What makes the policy of a job on these engines.

    Raises:
        ConfigError: there is no such order.
    """
    check_order(order)
    return lambda requests: Fleet(order, requests, [device.target for device in devices])


def device_of(info: EngineInfo, config: EngineConfig) -> JobDevice:
    """The numbers of a ready engine.

    Raises:
        ConfigError: the device's profile is broken.
        ModelError: the model's configuration lacks a number.
    """
    limits = config.scheduler
    threads = config.model.threads if info.device == "cpu" else 0
    profile = load_or_default(info.device, threads, info.dtype, info.device_name or None)
    kv_dtype = None if config.cache.kv_dtype == "auto" else config.cache.kv_dtype
    return JobDevice(
        Target(
            profile=as_run(profile, info.overlap),
            model=shape_of_folder(Path(info.path), info.dtype, kv_dtype),
            kv_tokens=info.pages * info.page_size,
            max_seqs=limits.max_num_seqs,
            step_tokens=limits.max_num_batched_tokens,
        ),
        window=max(1, min(4 * limits.max_num_seqs, limits.max_queue // 2)),
    )
