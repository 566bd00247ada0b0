"""How long a file of requests will take, told before it is validated: from a sample of its lines."""

import asyncio
import os
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
#: Bytes of a line that is looked at.
LONGEST = 1 << 20
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

    The lines of one place are in memory at a time: 2 `LONGEST` and a block. A longer one counts as no request.

    Raises:
        OSError: the file cannot be read.
        EngineDead: nobody can say what bodies mean.
    """
    limit = min(limit, LONGEST)
    seen: set[int] = set()
    prompts: list[int] = []
    outputs: list[float] = []
    size = length = 0
    for place in range(PLACES):
        found, size = await asyncio.to_thread(_lines_at, path, place, limit)
        for line in found:
            if line.offset in seen:
                continue
            seen.add(line.offset)
            length += line.length + 1
            try:
                asked = await endpoint.prepare(url, parse_line(line.data, (url,), limit).body)
            except EngineDead:
                raise
            except HeadraceError:
                continue  # it will be an error of the job
            prompts.append(sum(map(len, asked.prompts)))
            outputs.append(min(PRIOR_SHARE * asked.most, USUAL_OUTPUT))
    lines = max(1, len(seen))
    return Sample(size * lines / max(lines, length), prompts, outputs, len(prompts) / lines)


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


def _lines_at(path: Path, place: int, limit: int) -> tuple[list[RawLine], int]:
    """Some lines behind one of the places, which lie evenly apart; of a small file, the rest. And the file's size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        start = size * place // PLACES
        # The rest of one line and another; where nothing but blanks comes, no more is looked through.
        lines = read_lines(descriptor, start, 1, limit, start + 2 * limit + BLOCK)
        # But for the first place, the first line is most likely only the end of one.
        return list(islice(lines, 1 if start else 0, LINES_EACH + 1)), size
    finally:
        os.close(descriptor)
