"""A job's requests with what they cost on a device, what they share, and what they take in an order."""

from headrace.offline.planning.admission import ORACLE, make_admission
from headrace.offline.planning.blend import PAGE
from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.simulated_engine import Run, SimulatedEngine
from headrace.offline.planning.target import Target
from headrace.offline.planning.tree import Ints, PrefixTree, borrowed_tokens
from headrace.perf.density import CostRates
from headrace.perf.roofline import optimum_seconds


class Workload:
    """See above.

    Args:
        requests: of the job.
        lengths: int64 [n], output tokens each is expected to produce.
        target: what to plan for.

    Attributes:
        leaves: int64 [n], the requests in the order of their tokens.
        saved: int64 [n], prompt tokens of each that perfect prefix sharing leaves out.
        compute, memory: float64 [n], seconds of both kinds of work of each with perfect sharing.
    """

    def __init__(self, requests: JobRequests, lengths: Ints, target: Target) -> None:
        self.requests, self.lengths, self.target = requests, lengths, target
        self.leaves, self.saved = requests.by_tokens.leaves, requests.by_tokens.saved
        self._tree = PrefixTree.of(requests, PAGE)
        self._borrowed = borrowed_tokens(self._tree, requests.by_tokens.common, PAGE)
        rates = CostRates.of(target.profile, target.model, target.step_tokens)
        prompts = requests.prompt_lengths
        self.compute, self.memory = rates.compute(prompts, lengths, self.saved), rates.memory(prompts, lengths)

    @property
    def optimum_s(self) -> float:
        """The least time by the device's overlap rule."""
        return optimum_seconds(float(self.compute.sum()), float(self.memory.sum()), self.target.profile)

    def run(self, order: str, seed: int = 0, known: bool = False) -> Run:
        """The job in an order, simulated.

        Args:
            order: its name.
            seed: of random choices.
            known: the blended order may count on the lengths; else it learns them while the job runs.
        """
        target = self.target
        engine = SimulatedEngine(
            self.requests,
            self.lengths,
            self._tree,
            target.profile,
            target.model,
            target.kv_tokens,
            max_seqs=target.max_seqs,
            step_tokens=target.step_tokens,
            borrowed=self._borrowed,
        )
        admission = make_admission(
            order,
            self.requests,
            target.profile,
            target.model,
            target.kv_tokens,
            seed,
            self.lengths if known or order == ORACLE else None,
            max_seqs=target.max_seqs,
            step_tokens=target.step_tokens,
        )
        return engine.run(admission)
