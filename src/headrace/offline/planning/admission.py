"""Which requests of a job an engine gets next: the contract of every order, and the way to make one.

A policy: no I/O, no clock, no torch. Whoever runs a job hands over what `admit` names, tells what becomes of it, and
asks again whenever something has changed.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import ConfigError
from headrace.offline.planning.requests import JobRequests
from headrace.perf.density import CostRates
from headrace.perf.model_shape import ModelShape
from headrace.perf.profile import DeviceProfile

#: What a model costs; `perf.model_config.shape_of` reads it from a model's configuration.
ModelCost = ModelShape

ORDERS = ("fcfs", "random", "dfs", "balance", "blend")
#: The blended order of somebody who knows all output lengths: what estimating them costs. For evaluation.
ORACLE = "oracle"


class Admission(Protocol):
    """Names requests in the order of its policy; every request exactly once."""

    def admit(self) -> list[int]:
        """Requests to hand to the engine now, in this order; empty: wait until one has ended.

        Never empty while requests remain and none is under way.
        """
        ...

    def progress(self, requests: NDArray[np.int64], output_tokens: NDArray[np.int64]) -> None:
        """How many tokens admitted requests have produced so far. Optional: plans get better by it."""
        ...

    @property
    def step_tokens(self) -> int | None:
        """Rows that a step should have at most now, decoding ones included; None: as many as the engine takes."""
        ...

    @property
    def follows_progress(self) -> bool:
        """True while `admit` may name more just because running requests have gone on; else only after an end."""
        ...

    def finish(self, request: int, output_tokens: int) -> None:
        """An admitted request has ended, a failed one too, with this many tokens."""
        ...

    def withdraw(self, requests: NDArray[np.int64]) -> None:
        """These, not admitted yet, are somebody else's from now on."""
        ...

    def extend(self, requests: NDArray[np.int64]) -> None:
        """These, somebody else's so far, are to be admitted too."""
        ...

    def learn(self, request: int, output_tokens: int) -> None:
        """Somebody else's request has ended with this many tokens. Optional: estimates get better by it."""
        ...

    @property
    def remaining(self) -> int:
        """Requests not admitted yet."""
        ...


def check_order(order: str, oracle: bool = False) -> None:
    """Refuse an order that there is none of.

    Args:
        order: its name.
        oracle: the true lengths are known.

    Raises:
        ConfigError: there is no such order.
    """
    known = (*ORDERS, ORACLE) if oracle else ORDERS
    if order not in known:
        raise ConfigError(f"--order: {order!r} is not one of {', '.join(known)}")


def make_admission(
    order: str,
    requests: JobRequests,
    profile: DeviceProfile,
    model: ModelCost,
    kv_tokens: int,
    seed: int = 0,
    lengths: NDArray[np.int64] | None = None,
    *,
    max_seqs: int = 64,
    step_tokens: int = 512,
    part: NDArray[np.bool_] | None = None,
) -> Admission:
    """The policy of an order over the requests of a job.

    Args:
        order: one of `ORDERS`, or `ORACLE`.
        requests: of the job.
        profile: of the device the job runs on.
        model: that it runs.
        kv_tokens: tokens the engine's KV pool holds.
        seed: of random orders and samples.
        lengths: output lengths where they are known (evaluation); None: they are estimated while the job runs.
        max_seqs: sequences the engine runs at once.
        step_tokens: tokens of one engine step at most.
        part: which of the requests it is to admit; None: all.

    Raises:
        ConfigError: there is no such order, or it needs lengths.
    """
    from headrace.offline.planning.blend import BlendAdmission
    from headrace.offline.planning.fixed import FixedAdmission, fixed_order

    check_order(order, oracle=True)
    if order == ORACLE and lengths is None:
        raise ConfigError(f"--order: {ORACLE} needs the true output lengths, which only an evaluation has")
    if order in ("blend", ORACLE) and len(requests):
        return BlendAdmission(requests, profile, model, kv_tokens, seed, lengths, max_seqs, step_tokens, part)
    rates = CostRates.of(profile, model)
    return FixedAdmission(fixed_order(order, requests, seed, rates, lengths), 2 * max_seqs, part)
