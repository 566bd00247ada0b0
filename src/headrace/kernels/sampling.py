"""Token sampling on the CPU: batches of rows, in parallel over rows.

The randomness of a draw is a function of (seed, position) alone, so neither the batch nor the number of threads nor a
resume elsewhere changes a token.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from headrace.kernels.sampling_truncate import LEAST, draw, truncate
from headrace.kernels.sampling_weights import (
    BLOCK,
    MAX_VOCAB,
    Floats,
    Ints,
    first_of,
    float_bits,
    order_key,
    scan,
    sum_blocks,
    weigh,
)

_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)


@njit(nogil=True, cache=True)
def philox(key: int, low: int, high: int) -> tuple[int, int]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).

    Args:
        key: 64 bits.
        low, high: the 128-bit counter.

    Returns:
        The 128 random bits as two 64-bit words, the lower first.
    """
    k0, k1 = key & _LOW, key >> _WORD
    c0, c1, c2, c3 = low & _LOW, low >> _WORD, high & _LOW, high >> _WORD
    for _ in range(10):
        p0 = _MULTIPLIER_0 * c0
        p1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> _WORD) ^ c1 ^ k0, p1 & _LOW, (p0 >> _WORD) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return c0 | (c1 << _WORD), c2 | (c3 << _WORD)


@njit(nogil=True, cache=True)
def uniform(seed: int, position: int) -> float:
    """A float64 in [0, 1) with 53 random bits, a pure function of two uint64."""
    low, _ = philox(seed, position, np.uint64(0))
    return np.float64(low >> np.uint64(11)) * 2.0**-53


class Draws(NamedTuple):
    """How to draw from each of N rows; every field is an array [N].

    Attributes:
        rows: which row of the logits.
        temperature: 0 takes the most probable token, the lowest id on ties, as does top_k 1.
        top_k: 0 or less keeps all tokens.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        seeds, positions: what the uniform of the draw is made of.
    """

    rows: Ints
    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint64]


class Scratch(NamedTuple):
    """Working memory, one row per thread: V floats three times, one int per block."""

    weights: Floats
    found: Floats
    between: Floats
    block_ints: Ints


@njit(nogil=True, cache=True)
def sample_row(logits: Floats, draws: Draws, j: int, lane: int, scratch: Scratch) -> int:
    """The token of draw `j`, or -1 where the row is unusable."""
    row = logits[draws.rows[j]]
    weights = scratch.weights[lane]
    block_ints = scratch.block_ints[lane]
    top, unusable = scan(row, block_ints)
    if unusable:
        return -1
    top_k, top_p, min_p = draws.top_k[j], draws.top_p[j], draws.min_p[j]
    if draws.temperature[j] <= 0.0 or top_k == 1:
        return first_of(row, block_ints, top)
    weigh(row, top, 1.0 / draws.temperature[j], weights)
    mass = sum_blocks(weights, block_ints)
    bits, ties = np.int64(float_bits(LEAST)), row.shape[0]
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        bits, ties, mass = truncate(
            weights, mass, block_ints, top_k, top_p, min_p, scratch.found[lane], scratch.between[lane]
        )
    return draw(weights, block_ints, bits, ties, uniform(draws.seeds[j], draws.positions[j]) * mass)


# Numba's cache does not tell a serial from a parallel build of the same function, hence two of each.
@njit(nogil=True, cache=True)
def _sample_serial(logits: Floats, draws: Draws, scratch: Scratch, tokens: Ints) -> None:
    for j in range(tokens.shape[0]):
        tokens[j] = sample_row(logits, draws, j, 0, scratch)


@njit(nogil=True, cache=True, parallel=True)
def _sample_parallel(logits: Floats, draws: Draws, scratch: Scratch, tokens: Ints) -> None:
    lanes = scratch.weights.shape[0]
    for lane in prange(lanes):
        for j in range(lane, tokens.shape[0], lanes):
            tokens[j] = sample_row(logits, draws, j, lane, scratch)


class Logprobs(NamedTuple):
    """Log-probabilities of R rows.

    Attributes:
        values: [R] of the token asked about; NaN for an unusable row.
        ranks: [R] its rank: 1 + how many tokens are strictly more probable.
        top_ids, top_values: [R, top] the most probable tokens, best first, the lower id first on ties.
    """

    values: npt.NDArray[np.float64]
    ranks: npt.NDArray[np.int64]
    top_ids: Ints
    top_values: npt.NDArray[np.float64]


@njit(nogil=True, cache=True)
def best(row: Floats, block_keys: Ints, top_ids: Ints, top_values: npt.NDArray[np.float64]) -> None:
    """The largest logits of a row by insertion; a block whose maximum cannot displace the last of them is skipped."""
    wanted = top_ids.shape[0]
    found = 0
    for block in range(block_keys.shape[0] if wanted > 0 else 0):
        if found == wanted and block_keys[block] <= order_key(np.float32(top_values[wanted - 1])):
            continue
        for i in range(block * BLOCK, min(row.shape[0], block * BLOCK + BLOCK)):
            if found == wanted and row[i] <= top_values[wanted - 1]:
                continue
            found = min(found + 1, wanted)
            at = found - 1
            while at > 0 and top_values[at - 1] < row[i]:
                top_values[at] = top_values[at - 1]
                top_ids[at] = top_ids[at - 1]
                at -= 1
            top_values[at] = row[i]
            top_ids[at] = i


@njit(nogil=True, cache=True)
def logprobs_row(row: Floats, token: int, j: int, lane: int, scratch: Scratch, out: Logprobs) -> None:
    """Fill row `j` of `out`."""
    block_ints = scratch.block_ints[lane]
    weights = scratch.weights[lane]
    top, unusable = scan(row, block_ints)
    if unusable:
        out.values[j] = np.nan
        out.ranks[j] = 0
        return
    best(row, block_ints, out.top_ids[j], out.top_values[j])
    weigh(row, top, 1.0, weights)
    normaliser = np.float64(top) + np.log(sum_blocks(weights, block_ints))
    for at in range(out.top_ids.shape[1]):
        out.top_values[j, at] -= normaliser
    own = row[token]
    rank = np.int64(1)
    for i in range(row.shape[0]):
        rank += np.int64(row[i] > own)
    out.values[j] = np.float64(own) - normaliser
    out.ranks[j] = rank


@njit(nogil=True, cache=True)
def _logprobs_serial(logits: Floats, rows: Ints, tokens: Ints, scratch: Scratch, out: Logprobs) -> None:
    for j in range(tokens.shape[0]):
        logprobs_row(logits[rows[j]], tokens[j], j, 0, scratch, out)


@njit(nogil=True, cache=True, parallel=True)
def _logprobs_parallel(logits: Floats, rows: Ints, tokens: Ints, scratch: Scratch, out: Logprobs) -> None:
    lanes = scratch.weights.shape[0]
    for lane in prange(lanes):
        for j in range(lane, tokens.shape[0], lanes):
            logprobs_row(logits[rows[j]], tokens[j], j, lane, scratch, out)


class RowKernels:
    """The kernels with their scratch memory; calls must not overlap.

    Args:
        vocab_size: V, at most `MAX_VOCAB`.
        threads: rows are spread over this many; 1 runs serial code.

    Raises:
        ValueError: V is too large for exact sums.
    """

    def __init__(self, vocab_size: int, threads: int) -> None:
        if not 0 < vocab_size <= MAX_VOCAB:
            raise ValueError(f"sampling handles vocabularies of 1 to {MAX_VOCAB} tokens, got {vocab_size}")
        lanes = max(1, threads)
        self._scratch = Scratch(
            np.empty((lanes, vocab_size), np.float32),
            np.empty((lanes, vocab_size), np.float32),
            np.empty((lanes, vocab_size), np.float32),
            np.empty((lanes, -(-vocab_size // BLOCK)), np.int32),
        )

    def sample(self, logits: Floats, draws: Draws) -> Ints:
        """Draw one token for each of N rows of `logits` [R, V] (C-contiguous, not changed).

        Returns:
            [N] token ids; -1 where a row holds NaN or +inf, or nothing above -inf.
        """
        tokens = np.empty(draws.rows.shape[0], np.int32)
        kernel = _sample_parallel if len(self._scratch.weights) > 1 and len(tokens) > 1 else _sample_serial
        kernel(logits, draws, self._scratch, tokens)
        return tokens

    def logprobs(self, logits: Floats, rows: Ints, tokens: Ints, top: int) -> Logprobs:
        """Log-softmax of N rows of `logits` [R, V] at one token each, with the `top` (at most V) best tokens."""
        count = tokens.shape[0]
        out = Logprobs(
            np.empty(count, np.float64),
            np.empty(count, np.int64),
            np.empty((count, top), np.int32),
            np.full((count, top), np.nan, np.float64),
        )
        kernel = _logprobs_parallel if len(self._scratch.weights) > 1 and count > 1 else _logprobs_serial
        kernel(logits, rows, tokens, self._scratch, out)
        return out


@njit(nogil=True, cache=True)
def mask_rows(logits: Floats, rows: Ints, masks: Ints) -> None:
    """Set logits of forbidden tokens to -inf, in place.

    Args:
        logits: [R, V].
        rows: [N] rows to mask.
        masks: [N, words]; bit t % 32 of word t // 32 allows token t; tokens beyond the last word are forbidden.
    """
    for j in range(rows.shape[0]):
        row = logits[rows[j]]
        for word in range(-(-row.shape[0] // 32)):
            bits = masks[j, word] if word < masks.shape[1] else np.int32(0)
            if bits == -1:
                continue
            for i in range(word * 32, min(row.shape[0], word * 32 + 32)):
                if (bits >> np.int32(i & 31)) & np.int32(1) == 0:
                    row[i] = -np.inf
