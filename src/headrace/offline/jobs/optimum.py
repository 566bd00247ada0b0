"""How long the work of a job takes at best, while the job runs."""

from headrace.offline.planning.requests import JobRequests
from headrace.perf.density import CostRates
from headrace.perf.model_shape import ModelShape
from headrace.perf.profile import DeviceProfile
from headrace.perf.roofline import optimum_seconds


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
        self._saved = requests.by_tokens.saved
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
