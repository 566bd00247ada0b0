"""How far a job is and when it will be done: numbers for people and for `--json`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A look at a running job.

    Attributes:
        status: of the job.
        total: lines.
        completed: with an answer.
        failed: with an error.
        running: being generated now.
        prompt_tokens: of answered lines.
        cached_tokens: of them, not computed.
        output_tokens: of answered lines.
        seconds: it has run, earlier attempts included.
        tokens_per_s: prompt and output tokens of answered lines per second of this attempt.
        eta_s: seconds until the end at this rate; None as long as there is none.
        share_of_optimum: time that the work done so far would take at best, as a share of the time it took; None
            without a device profile.
    """

    status: str
    total: int
    completed: int
    failed: int
    running: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    eta_s: float | None
    share_of_optimum: float | None = None


class Pace:
    """Estimates the rest of an attempt from what it has finished.

    A request counts as its prompt plus the tokens it may generate times the share of these that finished ones used.

    Args:
        prompt_left: prompt tokens of the requests it has to run.
        most_left: tokens that they may generate.
    """

    def __init__(self, prompt_left: int, most_left: int) -> None:
        self._prompt_left = prompt_left
        self._most_left = most_left
        self._most_done = 0
        self._prompt_done = 0
        self._output_done = 0

    def finish(self, prompt: int, most: int, output: int) -> None:
        """A request has ended."""
        self._prompt_done += prompt
        self._most_done += most
        self._output_done += output

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of this attempt."""
        return self._prompt_done + self._output_done

    def rest(self, seconds: float) -> float | None:
        """Seconds left, when this attempt has run for `seconds`."""
        if not self._most_done or seconds <= 0:
            return None
        used = self._output_done / self._most_done
        left = self._prompt_left - self._prompt_done + used * (self._most_left - self._most_done)
        return max(0.0, left) * seconds / max(1, self.tokens)
