"""How long a file of requests will take, told before it is validated: from a sample of its lines."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from headrace.core.errors import EngineDead, HeadraceError
from headrace.offline.jobs.device import JobDevice
from headrace.offline.jobs.endpoint import Endpoint
from headrace.offline.jobs.lines import BLOCK, MAX_LINE, RawLine, parse_line, read_lines
from headrace.offline.planning.lengths import PRIOR_SHARE
from headrace.perf.density import CostRates
from headrace.perf.roofline import optimum_seconds

PLACES = 16
LINES_EACH = 4
#: What a job reaches of its optimum, sharing left out (own; `headrace plan` simulates a job and says more).
EFFICIENCY = 0.7
#: More tokens are not expected of a request that names no limit (own).
USUAL_OUTPUT = 512


@dataclass(frozen=True)
class Sample:
    """Lines from all over a file.

    Attributes:
        lines: how many the file has, estimated.
        prompts: prompt tokens of those in the sample that are requests.
        outputs: tokens they are expected to produce.
        requests: share of the sample that are requests.
    """

    lines: float
    prompts: list[int]
    outputs: list[float]
    requests: float


async def sample(path: Path, url: str, endpoint: Endpoint, limit: int = MAX_LINE) -> Sample:
    """Look at some lines of a file; each is understood as it would be in a job.

    Raises:
        OSError: the file cannot be read.
        EngineDead: nobody can say what bodies mean.
    """
    taken, size = await asyncio.to_thread(_some_lines, path, limit)
    prompts, outputs = [], []
    for line in taken:
        try:
            asked = await endpoint.prepare(url, parse_line(line.data, (url,), limit).body)
        except EngineDead:
            raise
        except HeadraceError:
            continue  # it will be an error of the job
        prompts.append(sum(map(len, asked.prompts)))
        outputs.append(min(PRIOR_SHARE * asked.most, USUAL_OUTPUT))
    mean = sum(line.length + 1 for line in taken) / max(1, len(taken))
    return Sample(size / max(1.0, mean), prompts, outputs, len(prompts) / max(1, len(taken)))


def seconds_of(sample: Sample, device: JobDevice) -> float:
    """How long the whole file takes on a device that nobody else uses."""
    if not sample.prompts:
        return 0.0
    target = device.target
    rates = CostRates.of(target.profile, target.model, target.step_tokens)
    compute = float(np.sum(rates.compute(sample.prompts, sample.outputs)))
    memory = float(np.sum(rates.memory(sample.prompts, sample.outputs)))
    each = optimum_seconds(compute, memory, target.profile) / len(sample.prompts)
    return each * sample.lines * sample.requests / EFFICIENCY


def _some_lines(path: Path, limit: int) -> tuple[list[RawLine], int]:
    """Some lines behind each of some places, evenly apart, of a small file all; and the file's size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        found: dict[int, RawLine] = {}
        for place in range(PLACES):
            start = size * place // PLACES
            # The rest of one line and another; where nothing but blanks comes, no more is looked through.
            lines: Iterator[RawLine] = read_lines(descriptor, start, 1, limit, start + 2 * limit + BLOCK)
            # But for the first place, the first line is most likely only the end of one.
            for line in islice(lines, 1 if start else 0, LINES_EACH + 1):
                found.setdefault(line.offset, line)
        return list(found.values()), size
    finally:
        os.close(descriptor)
