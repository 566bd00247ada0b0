"""The requests of a job as columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.offline.planning.sorting import SortedPrompts, sort_prompts


@dataclass(frozen=True)
class JobRequests:
    """Columns of a job; requests are their index 0..n-1.

    Attributes:
        tokens: int32, all prompts one after another.
        offsets: int64 [n + 1], where each prompt begins; the last is the number of tokens.
        max_tokens: int32 [n], the most tokens each may produce, at least 1.
        groups: int32 [n], a number per kind of request (endpoint, system prompt, class of max_tokens): relatives, whose
            output lengths are thought alike.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    max_tokens: NDArray[np.int32]
    groups: NDArray[np.int32]

    def __post_init__(self) -> None:
        """Refuse columns that do not fit each other."""
        count = len(self.max_tokens)
        if len(self.offsets) != count + 1 or len(self.groups) != count:
            raise ValueError(
                f"columns of {count} requests need {count + 1} offsets and {count} groups, "
                f"got {len(self.offsets)} and {len(self.groups)}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            raise ValueError(f"offsets must run from 0 to {len(self.tokens)} tokens")
        if count and (np.diff(self.offsets).min() < 1 or self.max_tokens.min() < 1):
            raise ValueError("every request needs at least one prompt token and max_tokens of at least 1")

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], groups: Sequence[int] | None = None
    ) -> "JobRequests":
        """Columns from one list per prompt; without `groups` all are of one kind."""
        offsets = np.zeros(len(prompts) + 1, np.int64)
        np.cumsum([len(prompt) for prompt in prompts], out=offsets[1:])
        tokens = np.empty(offsets[-1], np.int32)
        for index, prompt in enumerate(prompts):
            tokens[offsets[index] : offsets[index + 1]] = prompt
        kinds = np.zeros(len(prompts), np.int32) if groups is None else np.asarray(groups, np.int32)
        return cls(tokens, offsets, np.asarray(max_tokens, np.int32), kinds)

    def __len__(self) -> int:
        return len(self.max_tokens)

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Tokens of each prompt."""
        return np.diff(self.offsets)

    @cached_property
    def by_tokens(self) -> SortedPrompts:
        """The prompts sorted; done once, for everybody who plans these requests."""
        return sort_prompts(self.tokens, self.offsets)

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Tokens of one prompt (a view)."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def take(self, chosen: NDArray[np.int64]) -> "JobRequests":
        """The columns of some requests, in the order given."""
        lengths = self.prompt_lengths[chosen]
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Where each taken token stands: its place in its prompt, plus the prompt's beginning.
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        tokens = self.tokens[within + np.repeat(self.offsets[chosen], lengths)]
        return JobRequests(tokens, offsets, self.max_tokens[chosen], self.groups[chosen])
