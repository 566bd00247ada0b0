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
        seconds: it has generated, earlier attempts included.
        tokens_per_s: prompt and output tokens of answered lines per second that this attempt has generated.
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

    A request counts as its prompt plus the tokens it may generate times the share of these that answered ones used.

    Args:
        prompt_left: prompt tokens of the requests it has to run.
        most_left: tokens that they may generate.
    """

    def __init__(self, prompt_left: int, most_left: int) -> None:
        self._prompt_left = prompt_left
        self._most_left = most_left
        # Of those that were answered.
        self._most = 0
        self._prompt = 0
        self._output = 0

    def finish(self, prompt: int, most: int, output: int) -> None:
        """A request has ended with so many tokens; none: it was refused, and says nothing of how long others take.

        Args:
            prompt: tokens of its prompt, as they were counted into `prompt_left`.
            most: tokens that it might generate.
            output: those that it did.
        """
        self._prompt_left -= prompt
        self._most_left -= most
        if output:
            self._prompt += prompt
            self._most += most
            self._output += output

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of what was answered."""
        return self._prompt + self._output

    def rest(self, seconds: float) -> float | None:
        """Seconds left, when this attempt has run for `seconds`."""
        if not self._most or seconds <= 0:
            return None
        left = self._prompt_left + self._output / self._most * self._most_left
        return max(0.0, left) * seconds / self.tokens
