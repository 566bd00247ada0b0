"""Mechanism of a step: arrays, forward, sampling."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.errors import ModelError
from headrace.core.events import TokenLogprob
from headrace.core.plan import StepPlan
from headrace.engine.attention_step import AttentionStep
from headrace.engine.batch import BatchBuilder, StepBatch
from headrace.engine.graphs import DecodePath
from headrace.engine.kv_flow import KVSink, KVSource, NotArrived
from headrace.engine.kv_group import KVGroup
from headrace.engine.outcome import StepResult
from headrace.engine.pipeline import LocalSpan, Pipeline, Span, cut
from headrace.engine.sampling import RowState, Sampler, SampleRow
from headrace.engine.sequence import Sequence
from headrace.engine.twin import TwinSpan, TwinStep, worth_splitting
from headrace.kernels.attention import AttentionBackend
from headrace.model.decoder import Decoder, Forward

HEAD_ROWS = 128

#: Logits [R, vocab] float32 of R packed rows of a step.
LogitsOf = Callable[[NDArray[np.int64]], Tensor]


@dataclass(slots=True)
class StepOutput:
    """A finished plan.

    Attributes:
        plan: which one.
        result: what the scheduler needs; None if the plan was given up.
        logprobs: per sequence, one entry per new token, where asked for.
        prompt_logprobs: per sequence, entries for prompt positions `start + 1 ..` that this step made known.
        given_up: later plans that were given up with this one, in order.
    """

    plan: StepPlan
    result: StepResult | None
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    given_up: tuple[StepPlan, ...] = ()


class Runner:
    """Runs plans on this process's device.

    Args:
        decoder: the model.
        group: its KV.
        backend: attention kernels.
        sampler: picks tokens.
        max_num_seqs: most running sequences.
        max_model_len: most tokens of a sequence.
        flow: what every layer of every plan calls; default: what `submit` gets.
        spans: who runs which layers; default: this process, in `depth` parts.
        depth: plans in flight.
        decode_path: takes plans that are all decode, where there is no store, nothing else in flight, and every layer
            is here. Such a plan is not given up between layers.
        twin: a second backend, with which plans of decode and prompt rows that meet no store run as two halves side by
            side; None: as one.
    """

    def __init__(
        self,
        decoder: Decoder,
        group: KVGroup,
        backend: AttentionBackend,
        sampler: Sampler,
        max_num_seqs: int,
        max_model_len: int,
        flow: tuple[KVSource, KVSink] | None = None,
        spans: Seq[Span] | None = None,
        depth: int = 1,
        decode_path: DecodePath | None = None,
        twin: AttentionBackend | None = None,
    ) -> None:
        self._decoder = decoder
        self._group = group
        self._backend = backend
        self._sampler = sampler
        self._flow = flow
        self._decode_path = decode_path if flow is None and spans is None else None
        self._decoded: tuple[StepPlan, StepBatch, Tensor] | None = None
        page_size = group.shape.page_size
        self._builder = BatchBuilder(max_num_seqs, -(-max_model_len // page_size) + 1, page_size)
        self._twin = twin
        if spans is None:
            kind = LocalSpan if twin is None else TwinSpan
            spans = [kind(decoder, layers) for layers in cut(decoder.shape.num_layers, depth)]
        self._pipeline = Pipeline(decoder, spans)
        self._last = 0.0

    def __len__(self) -> int:
        return len(self._pipeline) + (self._decoded is not None)

    def pages_moved(self) -> None:
        """Page numbers of running sequences changed; called with nothing in flight."""
        self._builder.forget()

    def submit(self, plan: StepPlan, sequences: Seq[Sequence], flow: tuple[KVSource, KVSink] | None = None) -> None:
        """Put a plan in flight.

        Args:
            plan: what to compute.
            sequences: its chunks' sequences, in order.
            flow: what its layers call; None where it neither loads nor saves anything.
        """
        flow = flow or self._flow
        alone = not len(self)
        if alone:
            self._last = time.perf_counter()
        batch = self._builder.build(plan, sequences)
        if alone and flow is None and self._decode_path is not None and self._decode_path.accepts(plan):
            self._decoded = plan, batch, self._decode_path.run(batch)
            return
        heads, backend = self._decoder.shape.heads, self._backend
        if self._twin is not None and flow is None and worth_splitting(plan):
            step: AttentionStep | TwinStep = TwinStep(plan, batch, self._group, (backend, self._twin), heads)
        else:
            step = AttentionStep(plan, batch, self._group, backend, heads, flow)
        self._pipeline.submit(plan, batch, step)

    def collect(self, states: Callable[[str], RowState], interrupt: Callable[[], bool] | None = None) -> StepOutput:
        """Finish the oldest plan in flight.

        Args:
            states: the sampling state of a sequence.
            interrupt: asked between layers of an offline plan; True gives the plan up.
        """
        if self._decoded is not None:  # put in flight before all others
            plan, batch, logits = self._decoded
            self._decoded = None
            attention = 0.0
            output = self._sample(plan, batch, lambda rows: logits, states)
        else:
            try:
                item, done = self._pipeline.collect(interrupt)
            except NotArrived:
                self._last = time.perf_counter()
                first, *later = (item.plan for item in self._pipeline.give_up())
                return StepOutput(first, None, given_up=tuple(later))
            if not done:
                self._last = time.perf_counter()
                return StepOutput(item.plan, None)
            context = item.forward.step
            attention = context.seconds if isinstance(context, AttentionStep | TwinStep) else 0.0
            output = self._sample(item.plan, item.batch, partial(self._logits, item.forward), states)
        now = time.perf_counter()
        assert output.result is not None
        output.result = StepResult(output.result.tokens, now - self._last, output.result.errors, attention)
        self._last = now
        return output

    def _sample(
        self, plan: StepPlan, batch: StepBatch, logits_of: LogitsOf, states: Callable[[str], RowState]
    ) -> StepOutput:
        prompt_logprobs, errors = self._prompt_logprobs(batch, logits_of)
        if not len(batch.sample_rows):
            if self._decoder.device.type == "cuda":  # nothing is read from it: a step's time is what it takes there
                torch.cuda.current_stream(self._decoder.device).synchronize()
            return StepOutput(plan, StepResult({}, errors=errors), prompt_logprobs=prompt_logprobs)
        logits = logits_of(batch.sample_rows)
        rows = []
        for row, chunk in zip(batch.sample_rows.tolist(), batch.sampled.tolist(), strict=True):
            seq = batch.sequences[chunk]
            rows.append(
                SampleRow(
                    params=seq.request.params,
                    seed=seq.request.params.seed or 0,
                    position=int(batch.positions[row]) + 1,
                    prompt=seq.prompt,
                    output=seq.output,
                    state=states(seq.id),
                )
            )
        sampled = self._sampler.sample(logits, rows)
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprob]] = {}
        for i, chunk in enumerate(batch.sampled.tolist()):
            seq_id = batch.sequences[chunk].id
            tokens.setdefault(seq_id, []).append(int(sampled.tokens[i]))
            entry = sampled.logprobs[i]
            if entry is not None:
                logprobs.setdefault(seq_id, []).append(entry)
        errors |= {batch.sequences[int(batch.sampled[i])].id: text for i, text in sampled.errors.items()}
        return StepOutput(plan, StepResult(tokens, errors=errors), logprobs, prompt_logprobs)

    def _logits(self, forward: Forward, rows: NDArray[np.int64]) -> Tensor:
        return self._decoder.logits(forward, torch.from_numpy(rows).to(self._decoder.device, non_blocking=True))

    def _prompt_logprobs(
        self, batch: StepBatch, logits_of: LogitsOf
    ) -> tuple[dict[str, list[TokenLogprob]], dict[str, str]]:
        """Log-probabilities of the prompt tokens that follow this step's rows, the head a few rows at a time; and
        what went wrong, by sequence."""
        found: dict[str, list[TokenLogprob]] = {}
        errors: dict[str, str] = {}
        for i, seq in enumerate(batch.sequences):
            top = seq.request.params.prompt_logprobs
            first, last = int(batch.cu_q[i]), int(batch.cu_q[i + 1])
            start = int(batch.positions[first])
            last = min(last, first + seq.prompt_length - 1 - start)
            if top is None or last <= first:
                continue
            entries = found[seq.id] = []
            try:
                for a in range(first, last, HEAD_ROWS):
                    b = min(a + HEAD_ROWS, last)
                    following = seq.tokens[start + a - first + 1 : start + b - first + 1]
                    logits = logits_of(np.arange(a, b, dtype=np.int64))
                    entries += self._sampler.prompt_logprobs(logits, following, top)
            except ModelError as error:  # not a number: this request ends, the others go on
                errors[seq.id] = str(error)
        return found, errors
