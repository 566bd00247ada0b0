"""How long the work of a job takes at best, while the job runs."""

import numpy as np

from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.tree import common_prefixes, sorted_by_tokens
from headrace.perf.density import CostRates
from headrace.perf.model_shape import ModelShape
from headrace.perf.profile import DeviceProfile
from headrace.perf.roofline import optimum_seconds

#: Prompts of more tokens in all are not compared with each other: that takes memory, and a flat one was promised.
MOST_TOKENS = 20_000_000


class Optimum:
    """Adds up what finished requests take at best: every prefix that any two share computed once, an unlimited cache.

    Args:
        requests: that the attempt runs.
        profile: of the device.
        shape: of the model.
        step_tokens: tokens of a step at most.
    """

    def __init__(self, requests: JobRequests, profile: DeviceProfile, shape: ModelShape, step_tokens: int) -> None:
        self._profile = profile
        self._rates = CostRates.of(profile, shape, step_tokens)
        self._prompts = requests.prompt_lengths
        leaves = sorted_by_tokens(requests)
        self._saved = np.empty(len(requests), np.int64)
        self._saved[leaves] = common_prefixes(requests, leaves)
        self._compute = self._memory = 0.0

    def finish(self, request: int, output_tokens: int) -> None:
        """A request has ended with so many tokens."""
        prompt = self._prompts[request]
        if output_tokens:
            self._compute += float(self._rates.compute(prompt, output_tokens, self._saved[request]))
            self._memory += float(self._rates.memory(prompt, output_tokens))

    @property
    def seconds(self) -> float:
        """The least time of what has finished."""
        return optimum_seconds(self._compute, self._memory, self._profile)


def optimum_of(requests: JobRequests, profile: DeviceProfile, shape: ModelShape, step_tokens: int) -> Optimum | None:
    """The optimum of a job; None where it has too many tokens to be compared."""
    if not len(requests) or len(requests.tokens) > MOST_TOKENS:
        return None
    return Optimum(requests, profile, shape, step_tokens)
