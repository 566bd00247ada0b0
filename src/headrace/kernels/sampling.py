"""Token sampling on the CPU: draws and log-probabilities of batches of rows."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.errors import ModelError
from headrace.kernels import openmp, sampling_rows
from headrace.kernels.sampling_build import kernels
from headrace.kernels.sampling_weights import BLOCK, MAX_VOCAB, Floats, Ints


class Draws(NamedTuple):
    """How to draw from each of N rows; every field is an array [N].

    Attributes:
        rows: which row of the logits.
        temperature: 0 takes the most probable token, the lowest id on ties, as does top_k 1.
        top_k: 0 or less keeps all tokens.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        seeds, positions: what the uniform of the draw is made of.
        mask_of: which mask applies, or -1.
    """

    rows: Ints
    temperature: npt.NDArray[np.float64]
    top_k: Ints
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint64]
    mask_of: Ints


class Logprobs(NamedTuple):
    """Log-probabilities of N rows.

    Attributes:
        values: [N] of the token asked about; NaN for an unusable row.
        ranks: [N] its rank: 1 + how many tokens are strictly more probable.
        top_ids, top_values: [N, top] the most probable tokens, best first, the lower id first on ties.
    """

    values: npt.NDArray[np.float64]
    ranks: Ints
    top_ids: Ints
    top_values: npt.NDArray[np.float64]


class RowKernels:
    """The kernels with their scratch memory (3 x 4 x V bytes per thread); calls must not overlap.

    Args:
        vocab_size: V, at most `MAX_VOCAB`.
        threads: rows are spread over this many; 0: as many as torch uses.

    Raises:
        ModelError: V is too large for exact sums.
    """

    def __init__(self, vocab_size: int, threads: int) -> None:
        if not 0 < vocab_size <= MAX_VOCAB:
            raise ModelError(f"sampling handles vocabularies of 1 to {MAX_VOCAB} tokens, this model's has {vocab_size}")
        self.threads = openmp.check(threads)
        self._vocab_size = vocab_size
        self._sample, self._logprobs = kernels()
        blocks = -(-vocab_size // BLOCK)
        self._scratch = {
            "weights": np.empty((self.threads, vocab_size), np.float32),
            "found": np.empty((self.threads, vocab_size), np.float32),
            "between": np.empty((self.threads, vocab_size), np.float32),
            "keys": np.empty((self.threads, blocks), np.int32),
            "peaks": np.empty((self.threads, blocks), np.float32),
        }

    def sample(self, logits: Floats, draws: Draws, masks: Ints) -> Ints:
        """Draw one token for each of N rows.

        Args:
            logits: [R, V], C-contiguous; masked in place, else not changed.
            draws: how to draw.
            masks: [M, words] int32; bit t % 32 of word t // 32 allows token t, tokens beyond the last are forbidden.

        Returns:
            [N] token ids; -1 where a row holds NaN or +inf, or nothing above -inf.
        """
        tokens = np.empty(len(draws.rows), np.int32)
        self._run(
            self._sample,
            sampling_rows.SAMPLE_RECORD,
            logits,
            np.ascontiguousarray(draws.rows, np.int32),
            {
                "integers": np.stack([draws.mask_of, draws.top_k], axis=1).astype(np.int32),
                "masks": np.ascontiguousarray(masks, np.int32),
                "controls": np.stack([draws.temperature, draws.top_p, draws.min_p], axis=1).astype(np.float64),
                "counters": np.stack([draws.seeds, draws.positions], axis=1).astype(np.uint64),
                "tokens": tokens,
            },
            {"mask_words": masks.shape[1]},
        )
        return tokens

    def logprobs(self, logits: Floats, rows: Ints, tokens: Ints, top: int) -> Logprobs:
        """Log-softmax of N rows of `logits` [R, V] at one token each, with the `top` (at most V) best tokens."""
        count = len(tokens)
        top = min(top, self._vocab_size)
        out = Logprobs(
            np.empty(count, np.float64),
            np.empty(count, np.int32),
            np.empty((count, top), np.int32),
            np.empty((count, top), np.float64),
        )
        self._run(
            self._logprobs,
            sampling_rows.LOGPROBS_RECORD,
            logits,
            np.ascontiguousarray(rows, np.int32),
            {"tokens": np.ascontiguousarray(tokens, np.int32), **out._asdict()},
            {"top": top},
        )
        return out

    def _run(
        self,
        kernel: Any,
        record: np.dtype[Any],
        logits: Floats,
        rows: Ints,
        arrays: dict[str, npt.NDArray[Any]],
        numbers: dict[str, int],
    ) -> None:
        if logits.shape[1] != self._vocab_size or logits.dtype != np.float32 or not logits.flags.c_contiguous:
            raise ValueError(f"expected contiguous float32 logits of {self._vocab_size} columns, got {logits.shape}")
        if not len(rows):
            return
        argument = np.zeros(1, record)
        tickets = np.zeros(2, np.int64)
        for name, array in (arrays | self._scratch | {"tickets": tickets, "logits": logits, "rows": rows}).items():
            argument[0][name] = array.ctypes.data
        for name, number in (numbers | {"count": len(rows), "vocab": self._vocab_size}).items():
            argument[0][name] = number
        openmp.run(kernel.address, argument.ctypes.data, self.threads if len(rows) > 1 else 1)
