"""Traces like BlendServe's: BurstGPT, MMLU and OpenVid mixed to a wanted compute density and prefix sharing.

None of the three can be had with its texts, so requests are made from what the paper says of them (mean lengths,
sharing, density). Ours, where it says nothing: lengths are log-normal; how many questions of MMLU share their examples;
the prompts of a source begin with a few words of their own, as those of one job do, so a depth-first walk meets the
sources one after another.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.offline.planning.requests import JobRequests
from headrace.perf.density import CostRates

Ints = NDArray[np.int64]

#: (density, sharing) of the paper's four traces.
POINTS = ((1.4, 0.35), (0.9, 0.35), (1.4, 0.05), (0.9, 0.05))
SOURCES = ("burstgpt", "mmlu", "openvid")

_HEADER = 4  # tokens every prompt of a source begins with
_MMLU_PROMPT, _MMLU_SHARING = 804, 0.8646
_VIDEO_TOKENS = 16_000
#: Questions of MMLU that follow the same examples (own). MMLU has 57 subjects; so few sets of examples would stay in
#: the pool even in random order, for a trace of 40,000 requests has too few videos to fill it. With this number random
#: order loses as much of the sharing as the paper measured on its ten times longer traces, whose videos fill the pool.
QUESTIONS = 14
#: Spread of OpenVid's lengths, as standard deviation over mean (own).
VIDEO_SPREAD = 0.3
_VOCABULARY = 128_000


@dataclass(frozen=True)
class Trace:
    """A job with its true output lengths.

    Attributes:
        requests: in random order.
        lengths: int64 [n], output tokens of each.
        source: int64 [n], index into `SOURCES`.
    """

    requests: JobRequests
    lengths: Ints
    source: Ints


def make_trace(
    density: float,
    sharing: float,
    count: int,
    rates: CostRates,
    seed: int = 0,
    spread: float = VIDEO_SPREAD,
    walk: tuple[int, int, int] = (0, 1, 2),
    questions: int = QUESTIONS,
) -> Trace:
    """Requests of the three sources in such numbers that density and sharing of the whole are as wanted.

    Args:
        density: `(1-s) sum Comp / sum Mem`.
        sharing: s, share of prompt tokens saved by perfect sharing.
        count: requests.
        rates: of the device and model that the density is meant for.
        seed: of all random choices.
        spread: of the lengths of OpenVid's outputs.
        walk: in which order a depth-first walk meets the sources.
        questions: of MMLU that follow the same examples.
    """
    rng = np.random.default_rng(seed)
    examples = round(_MMLU_SHARING * _MMLU_PROMPT / (1 - 1 / questions))
    if not _HEADER < examples < _MMLU_PROMPT:
        raise ValueError(
            f"{questions} questions a subject cannot share {_MMLU_SHARING:.0%} of their prompts; take more"
        )
    prompts, outputs = _lengths(rng, count, spread, examples)
    saved = (_HEADER, examples * (1 - 1 / questions) + _HEADER / questions, _HEADER)
    numbers = _numbers(density, sharing, count, rates, prompts, outputs, saved)
    source = rng.permutation(np.repeat(np.arange(3), numbers))
    p, d = np.empty(count, np.int64), np.empty(count, np.int64)
    for kind in range(3):
        of_kind = np.flatnonzero(source == kind)
        p[of_kind], d[of_kind] = prompts[kind][: len(of_kind)], outputs[kind][: len(of_kind)]
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(p, out=offsets[1:])
    tokens = rng.integers(100, _VOCABULARY, offsets[-1], dtype=np.int32)
    for kind in range(3):
        header = rng.integers(100, _VOCABULARY, _HEADER, dtype=np.int32)
        header[0] = walk.index(kind)
        at = offsets[:-1][source == kind]
        tokens[at[:, None] + np.arange(_HEADER)] = header
    mmlu = rng.permutation(np.flatnonzero(source == 1))
    for begin in range(0, len(mmlu), questions):
        text = rng.integers(100, _VOCABULARY, examples - _HEADER, dtype=np.int32)
        at = offsets[:-1][mmlu[begin : begin + questions]] + _HEADER
        tokens[at[:, None] + np.arange(len(text))] = text
    limits = np.array([4096, 16, 2 * _VIDEO_TOKENS], np.int32)[source]
    requests = JobRequests(tokens, offsets, limits, source.astype(np.int32))
    return Trace(requests, np.minimum(d, limits), source)


def _lengths(rng: np.random.Generator, count: int, spread: float, examples: int) -> tuple[list[Ints], list[Ints]]:
    """Prompt and output tokens of `count` requests of each source; MMLU's prompts begin with `examples` tokens."""
    prompts = [
        _log_normal(rng, 244, 1.2, count, _HEADER + 1, 8000),
        examples + _log_normal(rng, _MMLU_PROMPT - examples, 0.5, count, 4, 1000),
        _log_normal(rng, 121, 0.3, count, _HEADER + 1, 1000),
    ]
    outputs = [
        # The spread that brings BurstGPT's density from the 31 of its means to the paper's 17.78.
        _log_normal(rng, 27, 3.6, count, 1, 4096),
        np.full(count, 2, np.int64),
        _log_normal(rng, _VIDEO_TOKENS, spread, count, 16, 2 * _VIDEO_TOKENS),
    ]
    return prompts, outputs


def _log_normal(rng: np.random.Generator, mean: float, spread: float, count: int, least: int, most: int) -> Ints:
    """Log-normal lengths of this mean and standard deviation over mean, between two bounds."""
    variance = np.log1p(spread**2)
    drawn = rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)
    drawn *= mean / np.clip(drawn, least, most).mean()
    return np.clip(np.round(drawn), least, most).astype(np.int64)


def _numbers(
    density: float,
    sharing: float,
    count: int,
    rates: CostRates,
    prompts: list[Ints],
    outputs: list[Ints],
    saved: tuple[float, float, float],
) -> Ints:
    """How many requests of each source: three linear conditions, in the means of those that are taken."""
    numbers = np.full(3, count)
    for _ in range(8):  # few videos are taken, so their mean is not that of all: what is taken decides
        numbers = _solved(
            density,
            sharing,
            count,
            rates,
            [p[: max(1, n)] for p, n in zip(prompts, numbers)],
            [d[: max(1, n)] for d, n in zip(outputs, numbers)],
            saved,
        )
    return numbers


def _solved(
    density: float,
    sharing: float,
    count: int,
    rates: CostRates,
    prompts: list[Ints],
    outputs: list[Ints],
    saved: tuple[float, float, float],
) -> Ints:
    compute = [float(rates.compute(p, d).mean()) for p, d in zip(prompts, outputs)]
    memory = [float(rates.memory(p, d).mean()) for p, d in zip(prompts, outputs)]
    length = [float(p.mean()) for p in prompts]
    conditions = np.array(
        [
            [(1 - sharing) * c - density * m for c, m in zip(compute, memory)],
            [s - sharing * p for s, p in zip(saved, length)],
            [1.0, 1.0, 1.0],
        ]
    )
    shares = np.linalg.solve(conditions, [0.0, 0.0, 1.0])
    if (shares < 0).any():
        raise ValueError(f"no mix of {', '.join(SOURCES)} has density {density} and sharing {sharing}")
    numbers = np.round(shares * count).astype(np.int64)
    numbers[0] += count - numbers.sum()
    return numbers
