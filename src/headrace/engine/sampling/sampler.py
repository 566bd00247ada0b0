"""The sampler of one engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.core.errors import ModelError
from headrace.core.events import TokenLogprob
from headrace.core.sampling import SamplingParams
from headrace.engine.sampling.grammar import GrammarCompiler
from headrace.engine.sampling.row import RowState, SampleResult, SampleRow
from headrace.kernels.sampling import Draws, Logprobs, RowKernels

if TYPE_CHECKING:
    from torch import Tensor

_INT32_MAX = (1 << 31) - 1
_SEED_BITS = (1 << 64) - 1


class Sampler:
    """Draws the next tokens of a batch of sequences.

    Each row goes through: logit_bias, penalties, min_tokens, grammar, temperature, min_p, top_k, top_p, draw. A row's
    token depends on its logits, parameters, seed and position alone, never on the other rows.

    Args:
        vocab_size: V, rows of the logits.
        eos_token_ids: end a sequence; min_tokens forbids them, a finished grammar demands one.
        tokenizer_path: folder with the tokenizer, for structured output; loaded when first needed.
        threads: CPU threads to use; 0: as many as torch uses.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], tokenizer_path: str | None, threads: int) -> None:
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._kernels = RowKernels(vocab_size, threads)
        self._grammars = GrammarCompiler(vocab_size, eos_token_ids, tokenizer_path, self._kernels.threads)

    def open(self, params: SamplingParams, prompt: Sequence[int] | npt.NDArray[np.int32]) -> RowState:
        """Begin a sequence with this prompt.

        Raises:
            InvalidRequest: its grammar cannot be used.
        """
        ends = params.stop_token_ids if params.ignore_eos else (*self._eos, *params.stop_token_ids)
        forbidden = np.unique(np.asarray([t for t in ends if t < self._vocab_size], np.int32))
        matcher = None if params.grammar is None else self._grammars.matcher(params.grammar)
        return RowState(params, np.asarray(prompt, np.int32), forbidden, matcher)

    def sample(self, logits: "Tensor", rows: Sequence[SampleRow]) -> SampleResult:
        """Draw one token per row.

        Args:
            logits: [R, V] float32, on any device; may be modified.
            rows: R of them.

        Returns:
            Tokens, log-probabilities of the unmodified distribution where asked for, and errors of single rows.
        """
        if logits.ndim != 2 or tuple(logits.shape) != (len(rows), self._vocab_size):
            raise ValueError(f"expected logits [{len(rows)}, {self._vocab_size}], got {list(logits.shape)}")
        table = _on_host(logits)
        raw: dict[int, npt.NDArray[np.float32]] = {}
        errors: dict[int, str] = {}
        constrained: list[int] = []
        masks = np.zeros((0, 0), np.int32)
        for r, row in enumerate(rows):
            state = row.state
            if state.plain or not state.changes(len(row.output)):
                continue
            if row.params.logprobs is not None:
                raw[r] = table[r].copy()
            state.adjust(table[r], row.output)
            if state.matcher is not None:
                state.matcher.follow(row.output)
                constrained.append(r)
        if constrained:
            masks = self._masks(rows, constrained, errors)
        tokens = self._kernels.sample(table, _draws(rows, constrained), masks)
        for r in np.flatnonzero(tokens < 0).tolist():
            errors.setdefault(r, f"no token can be drawn at position {rows[r].position}: {_describe(table[r])}")
        for r in errors:
            tokens[r] = -1
        return SampleResult(tokens, self._logprobs(table, raw, rows, tokens), errors)

    def prompt_logprobs(self, logits: "Tensor", next_tokens: npt.NDArray[np.int32], top: int) -> list[TokenLogprob]:
        """Log-probabilities of given tokens, with the `top` most probable ones.

        Args:
            logits: [R, V] float32.
            next_tokens: [R], the token that follows each row's position.

        Raises:
            ModelError: a row holds NaN or infinities.
        """
        table = _on_host(logits)
        every = np.arange(len(table), dtype=np.int32)
        found = self._kernels.logprobs(table, every, np.asarray(next_tokens, np.int32), top)
        if np.isnan(found.values).any():
            bad = int(np.flatnonzero(np.isnan(found.values))[0])
            raise ModelError(f"no log-probabilities for row {bad} of the prompt: {_describe(table[bad])}")
        return [_entry(found, j, int(token), top) for j, token in enumerate(next_tokens)]

    def _masks(
        self, rows: Sequence[SampleRow], constrained: Sequence[int], errors: dict[int, str]
    ) -> npt.NDArray[np.int32]:
        """What the grammars of the rows `constrained` allow, min_tokens taken into account."""
        matchers = [state.matcher for state in (rows[r].state for r in constrained) if state.matcher is not None]
        masks = self._grammars.masks(matchers)
        for r, matcher, mask in zip(constrained, matchers, masks, strict=True):
            error = matcher.error
            if error is not None:
                errors[r] = f"the grammar cannot go on at position {rows[r].position}: {error}"
            state = rows[r].state
            if len(rows[r].output) < state.min_tokens:
                shorter = mask.copy()
                for token in state.forbidden.tolist():
                    shorter.view(np.uint32)[token >> 5] &= ~np.uint32(1 << (token & 31))
                if shorter.any():  # else the text is complete: the grammar outranks min_tokens
                    mask[:] = shorter
        return masks

    def _logprobs(
        self,
        table: npt.NDArray[np.float32],
        raw: dict[int, npt.NDArray[np.float32]],
        rows: Sequence[SampleRow],
        tokens: npt.NDArray[np.int32],
    ) -> list[TokenLogprob | None]:
        result: list[TokenLogprob | None] = [None] * len(rows)
        wanted = [r for r, row in enumerate(rows) if row.params.logprobs is not None and tokens[r] >= 0]
        untouched = [r for r in wanted if r not in raw]
        changed = [r for r in wanted if r in raw]
        for group, source, at in (
            (untouched, table, untouched),
            (changed, np.stack([raw[r] for r in changed]) if changed else table, list(range(len(changed)))),
        ):
            if not group:
                continue
            tops = [rows[r].params.logprobs or 0 for r in group]
            found = self._kernels.logprobs(source, np.asarray(at, np.int32), tokens[group], max(tops))
            for j, r in enumerate(group):
                result[r] = _entry(found, j, int(tokens[r]), tops[j])
        return result


def _on_host(logits: "Tensor") -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.detach().float().cpu().numpy()
    return np.ascontiguousarray(array)


def _draws(rows: Sequence[SampleRow], constrained: Sequence[int]) -> Draws:
    count = len(rows)
    mask_of = np.full(count, -1, np.int32)
    mask_of[constrained] = np.arange(len(constrained))
    params = [row.params for row in rows]
    return Draws(
        np.arange(count, dtype=np.int32),
        np.fromiter((0.0 if p.greedy else p.temperature for p in params), np.float64, count),
        np.fromiter((min(p.top_k, _INT32_MAX) for p in params), np.int32, count),
        np.fromiter((p.top_p for p in params), np.float64, count),
        np.fromiter((p.min_p for p in params), np.float64, count),
        np.fromiter((row.seed & _SEED_BITS for row in rows), np.uint64, count),
        np.fromiter((row.position for row in rows), np.uint64, count),
        mask_of,
    )


def _entry(found: Logprobs, j: int, token: int, top: int) -> TokenLogprob:
    best = list(zip(found.top_ids[j, :top].tolist(), found.top_values[j, :top].tolist(), strict=True))
    return TokenLogprob(token, float(found.values[j]), int(found.ranks[j]), best)


def _describe(row: npt.NDArray[np.float32]) -> str:
    if np.isnan(row).any():
        return f"{int(np.isnan(row).sum())} of {len(row)} logits are NaN"
    return "a logit is infinite" if np.isposinf(row).any() else "all tokens are ruled out"
