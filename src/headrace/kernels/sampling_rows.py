"""The compiled sampling kernels: C functions that every thread of a team enters and that take rows from a counter.

The randomness of a draw is a function of (seed, position) alone, so neither the batch nor the number of threads nor a
resume elsewhere changes a token.
"""

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from headrace.kernels.memory import fetch_add, load_i32
from headrace.kernels.sampling_truncate import draw, truncate
from headrace.kernels.sampling_weights import BLOCK, LEAST, first_of, from_key, scan, sum_blocks, weigh

_COMMON = (
    "tickets",  # two int64: threads that came, rows taken
    "count", "vocab", "logits", "rows",
    "weights", "found", "between", "keys", "peaks",  # scratch; the first row of each belongs to the first thread
)  # fmt: skip
_SAMPLE = ("integers", "masks", "mask_words", "controls", "counters", "tokens")
_LOGPROBS = ("tokens", "top", "values", "ranks", "top_ids", "top_values")

SAMPLE_RECORD = np.dtype([(name, np.int64) for name in (*_COMMON, *_SAMPLE)])
"""Layout of the argument of `sample_kernel`: addresses and sizes."""

LOGPROBS_RECORD = np.dtype([(name, np.int64) for name in (*_COMMON, *_LOGPROBS)])
"""Layout of the argument of `logprobs_kernel`."""

_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def pointer(_typing: Any, _address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), emit

    return pointer


_float32s = _pointer_to(types.float32)
_float64s = _pointer_to(types.float64)
_int32s = _pointer_to(types.int32)
_uint64s = _pointer_to(types.uint64)


@njit
def philox(key, low, high):  # type: ignore[no-untyped-def]
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).

    Args:
        key: uint64.
        low, high: the 128-bit counter, uint64 each.

    Returns:
        The 128 random bits as two uint64, the lower first.
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


@njit
def uniform(seed, position):  # type: ignore[no-untyped-def]
    """A float64 in [0, 1) with 53 random bits, a pure function of two uint64."""
    low, _ = philox(seed, position, np.uint64(0))
    return np.float64(low >> np.uint64(11)) * 2.0**-53


@njit
def _mask_row(row, masks, words):  # type: ignore[no-untyped-def]
    """Set the logits of forbidden tokens to -inf: bit t % 32 of word t // 32 at address `masks` allows token t."""
    for word in range((row.shape[0] + 31) // 32):
        bits = np.int32(load_i32(masks, word)) if word < words else np.int32(0)
        start = word * 32
        if bits == 0:
            row[start : min(row.shape[0], start + 32)] = -np.inf
        elif bits != -1:
            for i in range(min(32, row.shape[0] - start)):
                if (bits >> np.int32(i)) & np.int32(1) == 0:
                    row[start + i] = -np.inf


@njit
def _sample_row(row, temperature, top_p, min_p, top_k, seed, position, weights, found, between, keys, peaks):  # type: ignore[no-untyped-def]
    top, unusable = scan(row, keys)
    if unusable:
        return -1
    if temperature <= 0.0 or top_k == 1:
        return first_of(row, keys, top)
    weigh(row, top, 1.0 / temperature, weights)
    mass = sum_blocks(weights, peaks)
    smallest, ties = LEAST, row.shape[0]
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        smallest, ties, mass = truncate(weights, mass, peaks, top_k, top_p, min_p, found, between)
    return draw(weights, peaks, smallest, ties, uniform(seed, position) * mass)


def sample_kernel(argument):  # type: ignore[no-untyped-def]
    """Draw a token for each row; `argument` points to one `SAMPLE_RECORD`."""
    a = carray(argument, 1)[0]
    lane = fetch_add(a.tickets, 1)
    size = a.vocab
    blocks = (size + BLOCK - 1) // BLOCK
    weights = carray(_float32s(a.weights + lane * size * 4), size)
    found = carray(_float32s(a.found + lane * size * 4), size)
    between = carray(_float32s(a.between + lane * size * 4), size)
    keys = carray(_int32s(a.keys + lane * blocks * 4), blocks)
    peaks = carray(_float32s(a.peaks + lane * blocks * 4), blocks)
    controls = carray(_float64s(a.controls), (a.count, 3))
    counters = carray(_uint64s(a.counters), (a.count, 2))
    tokens = carray(_int32s(a.tokens), a.count)
    while True:
        j = fetch_add(a.tickets + 8, 1)
        if j >= a.count:
            break
        row = carray(_float32s(a.logits + load_i32(a.rows, j) * size * 4), size)
        mask = load_i32(a.integers, 2 * j)
        if mask >= 0:
            _mask_row(row, a.masks + mask * a.mask_words * 4, a.mask_words)
        top_k = load_i32(a.integers, 2 * j + 1)
        tokens[j] = _sample_row(
            row, controls[j, 0], controls[j, 1], controls[j, 2], top_k, counters[j, 0], counters[j, 1],
            weights, found, between, keys, peaks,
        )  # fmt: skip


@njit
def _best(row, keys, top_ids, top_values):  # type: ignore[no-untyped-def]
    """The largest logits by insertion; a block whose maximum cannot displace the last of them is skipped."""
    wanted = top_ids.shape[0]
    found = 0
    for block in range(keys.shape[0] if wanted > 0 else 0):
        if found == wanted and from_key(keys[block]) <= top_values[wanted - 1]:
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


@njit
def _rank(row, own):  # type: ignore[no-untyped-def]
    """1 + how many logits are strictly larger."""
    larger = np.int32(0)
    for i in range(row.shape[0]):
        larger = np.int32(larger + np.int32(row[i] > own))
    return np.int32(1) + larger


def logprobs_kernel(argument):  # type: ignore[no-untyped-def]
    """Log-softmax of each row at one token; `argument` points to one `LOGPROBS_RECORD`."""
    a = carray(argument, 1)[0]
    lane = fetch_add(a.tickets, 1)
    size = a.vocab
    blocks = (size + BLOCK - 1) // BLOCK
    weights = carray(_float32s(a.weights + lane * size * 4), size)
    keys = carray(_int32s(a.keys + lane * blocks * 4), blocks)
    peaks = carray(_float32s(a.peaks + lane * blocks * 4), blocks)
    values = carray(_float64s(a.values), a.count)
    ranks = carray(_int32s(a.ranks), a.count)
    while True:
        j = fetch_add(a.tickets + 8, 1)
        if j >= a.count:
            break
        row = carray(_float32s(a.logits + load_i32(a.rows, j) * size * 4), size)
        top_ids = carray(_int32s(a.top_ids + j * a.top * 4), a.top)
        top_values = carray(_float64s(a.top_values + j * a.top * 8), a.top)
        top, unusable = scan(row, keys)
        values[j] = np.nan
        ranks[j] = 0
        if not unusable:
            _best(row, keys, top_ids, top_values)
            weigh(row, top, 1.0, weights)
            normaliser = np.float64(top) + np.log(sum_blocks(weights, peaks))
            for at in range(a.top):
                top_values[at] -= normaliser
            own = row[load_i32(a.tokens, j)]
            values[j] = np.float64(own) - normaliser
            ranks[j] = _rank(row, own)
