"""Plain Transformers as the judge of our tokens: teacher forcing, and its own greedy answer beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

#: A token's logit may lie this many standard deviations of its position's logits below the best (DESIGN: parity).
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Verdict:
    """What the reference says of one output.

    Attributes:
        margin: the largest distance of one of our tokens' logits from the best, in standard deviations of that
            position's logits; infinite where the reference's logits are not numbers.
        exact: whether the output equals the reference's own greedy one.
        divergence: where the first other token stands; None where exact.
        divergence_margin: the margin there: a near tie if it is within the tolerance.
    """

    margin: float
    exact: bool
    divergence: int | None = None
    divergence_margin: float = 0.0

    @property
    def holds(self) -> bool:
        """True when every token is as good as the best."""
        return self.margin <= TOLERANCE


class Reference:
    """A model in plain Transformers, fp32. Answers are kept, since most modes give the same output.

    Args:
        folder: of the model.
        longest: per prompt, how many greedy tokens will be asked for at most, so that `generate` runs once.
    """

    def __init__(self, folder: Path, longest: Mapping[tuple[int, ...], int] | None = None) -> None:
        transformers_logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._longest = longest or {}
        self._greedy: dict[tuple[int, ...], list[int]] = {}
        self._margins: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}

    def judge(self, prompt: Sequence[int], output: Sequence[int]) -> Verdict:
        """The verdict on an output of exactly that many greedy tokens (end-of-sequence ignored)."""
        margins = self._forced(tuple(prompt), tuple(output))
        greedy = self.greedy(prompt, len(output))
        first = next((i for i, (a, b) in enumerate(zip(output, greedy)) if a != b), None)
        return Verdict(
            margin=max(margins),
            exact=first is None,
            divergence=first,
            divergence_margin=0.0 if first is None else margins[first],
        )

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The reference's own greedy tokens, from `generate` with a KV cache."""
        key = tuple(prompt)
        if len(self._greedy.get(key, [])) < count:
            with torch.inference_mode():
                ids = torch.tensor([list(prompt)])
                out = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max(count, self._longest.get(key, 0)),
                    eos_token_id=None,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    pad_token_id=0,
                )
            self._greedy[key] = out[0, len(prompt) :].tolist()
        return self._greedy[key][:count]

    def _forced(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[float]:
        """Each token's distance from the best logit in standard deviations, from one forward over prompt + output."""
        key = (prompt, output)
        if key not in self._margins:
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *output]])
                # Logits from the prompt's last position on; the last output token predicts nothing we check.
                logits = self._model(ids, use_cache=False, logits_to_keep=len(output) + 1).logits[0, :-1].double()
                chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
                margins = (logits.max(-1).values - chosen) / logits.std(-1)
                margins = torch.where(margins.isfinite(), margins, torch.inf)
            self._margins[key] = margins.tolist()
        return self._margins[key]
