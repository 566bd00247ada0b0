"""Penalties on earlier tokens, kept as counts of the tokens that occurred rather than as rows of the vocabulary."""

import numpy as np
import numpy.typing as npt

from headrace.core.sampling import SamplingParams


class PenaltyCounts:
    """How often each token occurred in one sequence; follows its output as that grows or is cut back.

    Args:
        params: which penalties apply.
        prompt: prompt token ids; they matter to the repetition penalty alone.
    """

    def __init__(self, params: SamplingParams, prompt: npt.NDArray[np.int32]) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        known = np.unique(prompt) if params.repetition_penalty != 1 else prompt[:0]
        self._ids = np.empty(len(known) + 64, np.int32)
        self._ids[: len(known)] = known
        self._counts = np.zeros(len(known) + 64, np.int32)
        self._place = {int(token): place for place, token in enumerate(known)}
        self._prompt_tokens = len(known)
        self._output: list[int] = []

    def follow(self, output: npt.NDArray[np.int32]) -> None:
        """Count the tokens that are new; uncount those that were taken back."""
        while len(self._output) > len(output):
            self._counts[self._place[self._output.pop()]] -= 1
        for token in output[len(self._output) :].tolist():
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
            self._output.append(token)

    def apply(self, row: npt.NDArray[np.float32]) -> None:
        """Penalise one row of logits [V] in place.

        Repetition divides a positive and multiplies a negative logit (Keskar et al., "CTRL", 2019, section 4.1); then
        frequency is subtracted per occurrence in the output, and presence where there was one.
        """
        # a token that was taken back keeps its place; it must not count as repeated
        known = len(self._place)
        ids, counts = self._ids[:known], self._counts[:known]
        if known > self._prompt_tokens and not counts[self._prompt_tokens :].all():
            keep = counts > 0
            keep[: self._prompt_tokens] = True
            ids, counts = ids[keep], counts[keep]
        values = row[ids]
        if self._repetition != 1:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        row[ids] = values - (self._frequency * counts + self._presence * (counts > 0)).astype(np.float32)
