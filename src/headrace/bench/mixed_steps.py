"""What decode rows and prompt rows take in steps of their own, and in one step: what overlaps on this device.

On a CPU the rows of a step go through each layer together, so its weights are read once; attention of both kinds takes
turns. On CUDA with `--overlap` the two kinds run side by side on two streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import msgspec

from headrace.bench.calibrate import roofline_profile
from headrace.bench.local_engine import LocalEngine
from headrace.bench.parity_prompts import random_prompts
from headrace.bench.progress import progress
from headrace.bench.workload import Item
from headrace.core.errors import ConfigError, HeadraceError
from headrace.perf.presets import as_run
from headrace.perf.step_time import StepLoad, StepTimeModel

_STEPS = 5  # of each kind in a round
_numbers = count()


@dataclass
class Mix:
    """Seconds of steps of so many rows.

    Attributes:
        decoding: sequences that decode.
        prompt: rows of one prompt, computed whole.
        decode_s, prompt_s, together_s: seconds of each step.
        predicted: what the device's profile says of the step of both, as a share of the sum of the two others.
    """

    decoding: int
    prompt: int
    predicted: float
    decode_s: list[float] = field(default_factory=list)
    prompt_s: list[float] = field(default_factory=list)
    together_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians."""
        decode, prompt, both = (median(each) for each in (self.decode_s, self.prompt_s, self.together_s))
        return {
            "decode_rows": self.decoding,
            "prompt_rows": self.prompt,
            "decode_ms": round(decode * 1e3, 2),
            "prompt_ms": round(prompt * 1e3, 2),
            "together_ms": round(both * 1e3, 2),
            "together_over_sum": round(both / (decode + prompt), 3),
            "predicted_over_sum": round(self.predicted, 3),
            "together_over_longer": round(both / max(decode, prompt), 3),
        }


def measure(engine: LocalEngine, mixes: Sequence[tuple[int, int]], context: int = 128, rounds: int = 3) -> list[Mix]:
    """Time steps of each mix, in turn.

    Args:
        engine: without a store.
        mixes: (sequences that decode, rows of a prompt).
        context: tokens of the decoding sequences' prompts.
        rounds: how often.

    Raises:
        ConfigError: a mix is more than one step of this engine.
    """
    limits, info = engine.config.scheduler, engine.info
    for decoding, prompt in mixes:
        if decoding >= limits.max_num_seqs or decoding + prompt > limits.max_num_batched_tokens:
            raise ConfigError(
                f"--mix {decoding}+{prompt}: a step of this engine has at most {limits.max_num_seqs} sequences and "
                f"{limits.max_num_batched_tokens} tokens; raise --max-num-seqs or --max-num-batched-tokens"
            )
    times = StepTimeModel(as_run(roofline_profile(info, engine.config), info.overlap), engine.shape)
    found = [Mix(decoding, prompt, _predicted(times, decoding, prompt, context)) for decoding, prompt in mixes]
    with progress("mixed steps", rounds * len(found)) as advance:
        for number in range(rounds):
            for mix in found:
                _round(engine, mix, context, number)
                advance(1)
    return found


def _predicted(times: StepTimeModel, decoding: int, prompt: int, context: int) -> float:
    rows, load = sum([times.decode(context)] * decoding, StepLoad()), times.prefill(0, prompt, sampled=1)
    return times.seconds(rows + load) / (times.seconds(rows) + times.seconds(load))


def _round(engine: LocalEngine, mix: Mix, context: int, number: int) -> None:
    vocabulary = min(40_000, engine.info.vocab_size)
    prompts = random_prompts(vocabulary, [mix.prompt] * (2 * _STEPS + 1), 1, seed=number)
    running = random_prompts(vocabulary, [context] * mix.decoding, 4 * _STEPS + mix.decoding, seed=1000 + number)
    _one_step(engine, prompts[-1])  # first touches
    mix.prompt_s += [_one_step(engine, prompt) for prompt in prompts[:_STEPS]]
    names = [_add(engine, item) for item in running]
    started: set[str] = set()
    while len(started) < len(names):
        started |= {delta.request for delta in engine.engine.step() if delta.tokens}
    for prompt in prompts[_STEPS : 2 * _STEPS]:
        mix.decode_s.append(_one_step(engine))
        mix.together_s.append(_one_step(engine, prompt))
    for name in names:
        engine.engine.abort(name)
    while not engine.engine.idle:
        engine.engine.step()


def _add(engine: LocalEngine, item: Item) -> str:
    mark = f"#{next(_numbers)}"  # also keeps its KV from everybody else
    request = msgspec.structs.replace(item.request(mark), cache_salt=mark)
    engine.engine.add(request)
    return request.id


def _one_step(engine: LocalEngine, prompt: Item | None = None) -> float:
    """Seconds of a step; with a prompt, of the step that computes it."""
    name = None if prompt is None else _add(engine, prompt)
    before = engine.stats()
    deltas = engine.engine.step()
    after = engine.stats()
    if after.steps_total != before.steps_total + 1:
        raise HeadraceError(f"one step was to be timed, {after.steps_total - before.steps_total} were made")
    if name is not None and not any(delta.request == name and delta.finish for delta in deltas):
        raise HeadraceError("a prompt took more than one step; give the engine a larger --kv-memory")
    return after.step_seconds_total - before.step_seconds_total
