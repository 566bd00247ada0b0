"""The sampling kernels against a reference that sorts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ModelError
from headrace.kernels.sampling import Draws, RowKernels
from headrace.kernels.sampling_rows import philox, uniform
from headrace.kernels.sampling_truncate import draw, truncate
from headrace.kernels.sampling_weights import BLOCK, LEAST, MAX_VOCAB, scan, sum_blocks, weigh

NO_MASK = np.zeros((0, 0), np.int32)


def weights_of(row, temperature):
    keys = np.empty(-(-len(row) // BLOCK), np.int32)
    top, unusable = scan(row, keys)
    assert not unusable
    weights = np.empty_like(row)
    weigh(row, top, 1.0 / temperature, weights)
    return weights


def kept_by_sorting(weights, top_k, top_p, min_p):
    """min_p, top_k, top_p by a full stable sort: bool [V], and the kept mass."""
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order].astype(np.float64)
    n = int((ranked > 0).sum())
    if min_p > 0:
        n = min(n, int((weights >= np.float32(min_p)).sum()))
    if top_k > 0:
        n = min(n, top_k)
    running = np.cumsum(ranked[:n])
    if top_p < 1:
        n = min(n, int(np.searchsorted(running, top_p * running[-1], side="left")) + 1)
    kept = np.zeros(len(weights), bool)
    kept[order[:n]] = True
    return kept, running[n - 1]


def kept_by_kernel(weights, top_k, top_p, min_p):
    peaks = np.empty(-(-len(weights) // BLOCK), np.float32)
    total = sum_blocks(weights, peaks)
    found, between = np.empty_like(weights), np.empty_like(weights)
    smallest, ties, mass = truncate(weights, total, peaks, top_k, top_p, min_p, found, between)
    kept = weights > smallest
    kept[np.flatnonzero(weights == smallest)[:ties]] = True
    return kept, mass


def one(kernels, logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None, mask_of=None):
    n = len(logits)
    zeros = np.zeros(n, np.uint64)
    return Draws(
        np.arange(n, dtype=np.int32),
        np.full(n, temperature),
        np.full(n, top_k, np.int32),
        np.full(n, top_p),
        np.full(n, min_p),
        zeros if seeds is None else seeds.astype(np.uint64),
        zeros if positions is None else positions.astype(np.uint64),
        np.full(n, -1, np.int32) if mask_of is None else mask_of,
    )


def chi_square_ok(observed, expected):
    """Within 5 standard deviations of the statistic's mean, over cells expected at least 5 times."""
    big = expected >= 5
    observed = np.append(observed[big], observed[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@st.composite
def rows(draw_from):
    """Logits with ties (coarse steps), long tails, -inf, and sizes around the block."""
    size = draw_from(st.sampled_from([1, 2, 63, 64, 65, 129, 1000, 5000]))
    seed = draw_from(st.integers(0, 2**32 - 1))
    spread = draw_from(st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]))
    row = np.random.default_rng(seed).standard_normal(size) * spread
    step = draw_from(st.sampled_from([0.0, 0.5, 3.0]))
    if step:
        row = np.round(row / step) * step
    row = row.astype(np.float32)
    ruled_out = draw_from(st.sampled_from([0.0, 0.3, 0.99]))
    gone = np.random.default_rng(seed + 1).random(size) < ruled_out
    gone[int(np.argmax(row))] = False
    row[gone] = -np.inf
    return row


@settings(max_examples=400, deadline=None)
@given(
    row=rows(),
    temperature=st.sampled_from([1e-4, 0.3, 0.8, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 7, 50, 999, 10**9]),
    top_p=st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.5, 0.95, 0.999999]), st.floats(0.001, 1.0)),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
)
def test_kept_tokens_are_those_of_a_full_sort(row, temperature, top_k, top_p, min_p):
    weights = weights_of(row, temperature)
    kept, mass = kept_by_kernel(weights, top_k, top_p, min_p)
    expected, expected_mass = kept_by_sorting(weights, top_k, top_p, min_p)
    assert np.array_equal(kept, expected)
    assert mass == expected_mass


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 0.9999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_kept_tokens_of_a_large_vocabulary(spread, top_p):
    row = (np.random.default_rng(3).standard_normal(49152) * spread).astype(np.float32)
    weights = weights_of(row, 0.8)
    for top_k in (0, 40, 5000):
        kept, mass = kept_by_kernel(weights, top_k, top_p, 0.0)
        expected, expected_mass = kept_by_sorting(weights, top_k, top_p, 0.0)
        assert np.array_equal(kept, expected)
        assert mass == expected_mass


@settings(max_examples=100, deadline=None)
@given(row=rows(), temperature=st.sampled_from([0.5, 1.0, 3.0]))
def test_weights_are_exponentials_on_a_grid(row, temperature):
    weights = weights_of(row, temperature)
    exact = np.exp((row.astype(np.float64) - row.max()) / temperature)
    # float32 rounds the exponent, up to 24 in size, to 2^-19 of itself at worst in the tail
    assert np.all(np.abs(weights - exact) <= 4e-6 * exact + 2.0**-34)
    assert weights.max() == 1
    assert np.all(weights.astype(np.float64) * 2.0**34 % 1 == 0)


@settings(max_examples=100, deadline=None)
@given(row=rows(), top_p=st.sampled_from([0.3, 0.9, 1.0]), top_k=st.sampled_from([0, 5]), share=st.floats(0, 1))
def test_draw_inverts_the_distribution_in_order_of_ids(row, top_p, top_k, share):
    weights = weights_of(row, 1.0)
    kept, mass = kept_by_sorting(weights, top_k, top_p, 0.0)
    point = min(share, 1 - 2.0**-53) * mass
    peaks = np.empty(-(-len(row) // BLOCK), np.float32)
    total = sum_blocks(weights, peaks)
    smallest, ties, _ = truncate(weights, total, peaks, top_k, top_p, 0.0, np.empty_like(row), np.empty_like(row))
    expected = int(np.argmax(np.cumsum(np.where(kept, weights, 0).astype(np.float64)) > point))
    assert draw(weights, peaks, smallest, ties, point) == expected


def test_draw_covers_both_ends():
    weights = np.full(130, LEAST, np.float32)
    weights[5] = 1
    peaks = np.empty(3, np.float32)
    total = sum_blocks(weights, peaks)
    assert draw(weights, peaks, LEAST, 130, 0.0) == 0
    assert draw(weights, peaks, LEAST, 130, (1 - 2.0**-53) * total) == 129


@pytest.mark.parametrize(
    ("key", "low", "high", "words"),
    [  # known answers published with Random123
        (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, 2**64 - 1, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            0x85A308D3243F6A88,
            0x0370734413198A2E,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(key, low, high, words):
    first, second = philox(np.uint64(key), np.uint64(low), np.uint64(high))
    assert (first, second) == (words[0] | words[1] << 32, words[2] | words[3] << 32)


def test_uniforms_of_neighbouring_seeds_and_positions_are_independent():
    grid = np.array([[uniform(np.uint64(s), np.uint64(p)) for p in range(200)] for s in range(200)])
    assert grid.min() >= 0
    assert grid.max() < 1
    for a, b in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:]), (grid[:-1, :-1], grid[1:, 1:])):
        cells = np.histogram2d(a.ravel(), b.ravel(), bins=16, range=[[0, 1], [0, 1]])[0].ravel()
        assert chi_square_ok(cells, np.full(256, cells.sum() / 256))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (1.5, 20, 1.0, 0.0), (1.0, 0, 1.0, 0.1), (0.9, 30, 0.9, 0.02)],
)
def test_frequencies_are_those_of_the_truncated_softmax(temperature, top_k, top_p, min_p):
    draws = 20_000
    row = (np.random.default_rng(11).standard_normal(300) * 2).astype(np.float32)
    logits = np.broadcast_to(row, (draws, 300)).copy()
    kernels = RowKernels(300, 2)
    tokens = kernels.sample(
        logits,
        one(
            kernels, logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            seeds=np.arange(draws) // 100, positions=np.arange(draws) % 100,
        ),
        NO_MASK,
    )  # fmt: skip
    exact = torch.softmax(torch.from_numpy(row).double() / temperature, 0).numpy()
    kept, _ = kept_by_sorting((exact / exact.max()).astype(np.float32), top_k, top_p, min_p)
    exact = np.where(kept, exact, 0)
    observed = np.bincount(tokens, minlength=300)
    assert not observed[~kept].any()
    assert chi_square_ok(observed, exact / exact.sum() * draws)


@pytest.mark.parametrize("threads", [1, 2])
def test_greedy_is_argmax_with_the_lowest_id_on_ties(threads):
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(5)).round().numpy()
    kernels = RowKernels(1000, threads)
    expected = torch.argmax(torch.from_numpy(logits), -1).numpy()
    assert np.array_equal(kernels.sample(logits, one(kernels, logits, temperature=0.0), NO_MASK), expected)
    assert np.array_equal(kernels.sample(logits, one(kernels, logits, temperature=9.0, top_k=1), NO_MASK), expected)
    zeros = np.array([[-1.0, -0.0, 0.0, -0.0]], np.float32)
    assert RowKernels(4, 1).sample(zeros, one(None, zeros, temperature=0.0), NO_MASK)[0] == 1


def test_tokens_do_not_depend_on_threads_or_batch():
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((33, 3000)) * 3).astype(np.float32)
    seeds, positions = rng.integers(0, 2**63, 33), rng.integers(0, 9999, 33)
    how = {"temperature": 0.9, "top_p": 0.97, "top_k": 300}
    serial, threaded = RowKernels(3000, 1), RowKernels(3000, 3)
    together = threaded.sample(logits, one(threaded, logits, seeds=seeds, positions=positions, **how), NO_MASK)
    for r in range(33):
        alone = one(serial, logits[r : r + 1], seeds=seeds[r : r + 1], positions=positions[r : r + 1], **how)
        assert serial.sample(logits[r : r + 1], alone, NO_MASK)[0] == together[r]


def test_unusable_rows_are_told_and_leave_others_alone():
    logits = np.zeros((6, 100), np.float32)
    logits[0, 7] = np.nan
    logits[1, 7] = -np.nan
    logits[2] = -np.inf
    logits[3, 99] = np.inf
    logits[4, :] = -np.inf
    logits[4, 42] = -3e38
    logits[5, 3] = 50
    kernels = RowKernels(100, 2)
    for temperature in (0.0, 1.0):
        tokens = kernels.sample(logits.copy(), one(kernels, logits, temperature=temperature, top_p=0.9), NO_MASK)
        assert tokens.tolist() == [-1, -1, -1, -1, 42, 3]


@settings(max_examples=60, deadline=None)
@given(size=st.sampled_from([1, 31, 32, 33, 100, 257]), seed=st.integers(0, 999), missing=st.sampled_from([0, 1, 2]))
def test_masks_forbid_tokens(size, seed, missing):
    rng = np.random.default_rng(seed)
    words = max(1, -(-size // 32) - missing)
    masks = rng.integers(-(2**31), 2**31, (2, words)).astype(np.int32)
    masks[1] = [rng.choice([0, -1]) for _ in range(words)]
    logits = rng.standard_normal((3, size)).astype(np.float32)
    kernels = RowKernels(size, 1)
    masked = logits.copy()
    kernels.sample(masked, one(kernels, logits, mask_of=np.array([1, -1, 0], np.int32)), masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(bool)
    bits = np.pad(bits, ((0, 0), (0, size)))[:, :size]
    assert np.array_equal(masked[1], logits[1])
    for row, mask in ((0, 1), (2, 0)):
        assert np.array_equal(masked[row], np.where(bits[mask], logits[row], -np.inf))


@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("size", [3, 64, 1000, 49152])
def test_logprobs_are_torchs(size, top):
    generator = torch.Generator().manual_seed(size + top)
    logits = torch.randn(9, size, generator=generator) * 4
    logits[3:6] = logits[3:6].round()  # ties
    tokens = torch.randint(size, (9,), generator=generator)
    found = RowKernels(size, 2).logprobs(logits.numpy(), np.arange(9), tokens.numpy(), top)
    exact = torch.log_softmax(logits.double(), -1)
    chosen = exact[torch.arange(9), tokens]
    assert np.allclose(found.values, chosen.numpy(), atol=1e-5)
    ranks = 1 + (logits > logits[torch.arange(9), tokens][:, None]).sum(-1)
    assert found.ranks.tolist() == ranks.tolist()
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, : min(top, size)]
    assert np.array_equal(found.top_ids, order)
    assert np.allclose(found.top_values, np.take_along_axis(exact.numpy(), order, 1), atol=1e-5)


def test_logprobs_of_an_unusable_row_are_nan():
    logits = np.zeros((2, 10), np.float32)
    logits[0, 3] = np.nan
    found = RowKernels(10, 1).logprobs(logits, np.arange(2), np.zeros(2, np.int32), 2)
    assert np.isnan(found.values[0])
    assert found.values[1] == pytest.approx(-np.log(10))


def test_vocabularies_too_large_for_exact_sums_are_refused():
    with pytest.raises(ModelError, match=str(MAX_VOCAB)):
        RowKernels(MAX_VOCAB + 1, 1)
