"""Given tokens through the paged path, without a scheduler or a sampler: the logits they get."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.core.plan import StepPlan
from headrace.engine.attention_step import AttentionStep
from headrace.engine.batch import StepBatch
from headrace.engine.graphs import DecodePath
from headrace.engine.kv_group import KVGroup
from headrace.kernels.attention import AttentionBackend
from headrace.model.decoder import Decoder


class ForcedRun:
    """Sequences whose KV lies in shuffled pages of a group; nobody else may use the group.

    Args:
        decoder: the model.
        group: its KV.
        backend: attention kernels.
        sequences: token ids of each.
        seed: of the order of pages.

    Raises: ValueError if the group has too few pages.
    """

    def __init__(
        self,
        decoder: Decoder,
        group: KVGroup,
        backend: AttentionBackend,
        sequences: Sequence[Sequence[int]],
        seed: int = 0,
    ) -> None:
        self._decoder, self._group, self._backend = decoder, group, backend
        self._tokens = [np.asarray(sequence, np.int64) for sequence in sequences]
        counts = [-(-len(tokens) // group.shape.page_size) for tokens in self._tokens]
        if sum(counts) > group.pages:
            raise ValueError(f"{len(sequences)} sequences need {sum(counts)} pages, the group has {group.pages}")
        order = np.random.default_rng(seed).permutation(group.pages)
        self._tables = np.zeros((len(counts), max(counts)), np.int32)
        at = 0
        for table, count in zip(self._tables, counts):
            table[:count] = order[at : at + count]
            at += count

    def batch(self, chunks: Sequence[tuple[int, int, int]]) -> StepBatch:
        """A step of (sequence, first position, rows)."""
        size = self._group.shape.page_size
        which = [sequence for sequence, _, _ in chunks]
        lengths = np.array([count for _, _, count in chunks], np.int64)
        ends = np.array([start + count for _, start, count in chunks], np.int64)
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in chunks])
        tables = self._tables[which, : int(-(-ends.max() // size))]
        pages = tables[np.repeat(np.arange(len(chunks)), lengths), positions // size]
        return StepBatch(
            sequences=(),
            input_ids=np.concatenate([self._tokens[i][start : start + count] for i, start, count in chunks]),
            positions=positions,
            cu_q=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            kv_lens=ends.astype(np.int32),
            block_tables=tables,
            slots=pages.astype(np.int64) * size + positions % size,
            sample_rows=np.zeros(0, np.int64),
            sampled=np.zeros(0, np.int64),
        )

    def compute(self, batch: StepBatch, rows: Tensor | None = None) -> Tensor:
        """Logits [rows, vocab] of a step on the way that takes any plan; `rows`: of which rows, default all."""
        decoder, device = self._decoder, self._decoder.device
        step = AttentionStep(StepPlan(0, ()), batch, self._group, self._backend, decoder.shape.heads, None)
        ids = torch.from_numpy(batch.input_ids).to(device)
        forward = decoder.begin(ids, torch.from_numpy(batch.positions).to(device), step)
        decoder.run(forward, 0, decoder.shape.num_layers)
        return decoder.logits(forward, torch.arange(len(ids), device=device) if rows is None else rows)

    def prefill(self, prompts: Sequence[int]) -> None:
        """Store the KV of the first `prompts[i]` tokens of every sequence, in one step."""
        chunks = [(i, 0, count) for i, count in enumerate(prompts)]
        self.compute(self.batch(chunks), torch.zeros(1, dtype=torch.int64, device=self._decoder.device))

    def decode(self, prompts: Sequence[int], path: DecodePath | None = None) -> list[Tensor]:
        """Logits [length - prompt, vocab] of the positions after each prompt, one token of every sequence per step.

        Args:
            prompts: tokens of each sequence whose KV is stored already.
            path: computes the steps; None: the way that takes any plan.
        """
        found: list[list[Tensor]] = [[] for _ in self._tokens]
        for step in range(max(len(tokens) - prompt for tokens, prompt in zip(self._tokens, prompts))):
            chunks = [(i, at + step, 1) for i, at in enumerate(prompts) if at + step < len(self._tokens[i])]
            batch = self.batch(chunks)
            logits = (self.compute(batch) if path is None else path.run(batch)).clone()
            for (i, _, _), row in zip(chunks, logits):
                found[i].append(row)
        return [torch.stack(rows) for rows in found]
