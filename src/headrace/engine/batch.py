"""A step plan as arrays: the packed row, and where its KV lies."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import StepPlan
from headrace.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The packed row of a step: chunk i owns rows `cu_q[i]:cu_q[i+1]`.

    Attributes:
        sequences: one per chunk.
        input_ids: [T] int64.
        positions: [T] int64, position of each row in its own sequence.
        cu_q: [chunks + 1] int32, first row of each chunk, and T.
        kv_lens: [chunks] int32, tokens of context, the chunk's own included.
        block_tables: [chunks, pages] int32, page numbers in order of position.
        slots: [T] int64, `page * page_size + offset` where each row's KV goes.
        sample_rows: [S] int64, rows whose logits are sampled, in order of chunk and position.
        sampled: for each of them, the chunk.
    """

    sequences: Seq[Sequence]
    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    cu_q: NDArray[np.int32]
    kv_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slots: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    sampled: NDArray[np.int64]


class BatchBuilder:
    """Builds batches; keeps each running sequence's block table in a row of one array.

    Args:
        rows: most running sequences.
        max_pages: most pages a sequence may have.
        page_size: tokens per page.
    """

    def __init__(self, rows: int, max_pages: int, page_size: int) -> None:
        self._table = np.zeros((rows, max_pages), np.int32)
        self._owner: list[list[int] | None] = [None] * rows
        self._filled = [0] * rows
        self._page_size = page_size

    def forget(self) -> None:
        """Pages were renumbered (the group shrank): read all page lists again."""
        self._filled = [0] * len(self._filled)

    def build(self, plan: StepPlan, sequences: Seq[Sequence]) -> StepBatch:
        """Arrays for a plan; `sequences` are its chunks' sequences, in order."""
        chunks = plan.chunks
        count = len(chunks)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, count)
        lengths = np.fromiter((chunk.length for chunk in chunks), np.int64, count)
        samples = np.fromiter((chunk.sample for chunk in chunks), np.int64, count)
        rows = np.fromiter((self._sync(seq) for seq in sequences), np.int64, count)
        cu_q = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=cu_q[1:])
        chunk_of_row = np.repeat(np.arange(count), lengths)
        positions = np.arange(cu_q[-1]) - np.repeat(cu_q[:-1] - starts, lengths)
        input_ids = np.empty(cu_q[-1], np.int64)
        for i, (seq, chunk) in enumerate(zip(sequences, chunks, strict=True)):
            input_ids[cu_q[i] : cu_q[i + 1]] = seq.tokens[chunk.start : chunk.end]
        size = self._page_size
        ends = starts + lengths
        widest = int(-(-ends.max() // size))
        sampled = np.repeat(np.arange(count), samples)
        before = np.cumsum(samples) - samples
        sample_rows = (cu_q[1:] - samples)[sampled] + (np.arange(len(sampled)) - before[sampled])
        return StepBatch(
            sequences=sequences,
            input_ids=input_ids,
            positions=positions,
            cu_q=cu_q.astype(np.int32),
            kv_lens=ends.astype(np.int32),
            block_tables=self._table[rows, :widest],
            slots=self._table[rows[chunk_of_row], positions // size].astype(np.int64) * size + positions % size,
            sample_rows=sample_rows,
            sampled=sampled,
        )

    def _sync(self, seq: Sequence) -> int:
        """Bring a sequence's row of the table up to date and return the row."""
        row, pages = seq.row, seq.pages
        if self._owner[row] is not pages:  # another sequence, or this one admitted anew: both bring a new list
            self._owner[row] = pages
            self._filled[row] = 0
        filled = self._filled[row]
        if filled < len(pages):
            self._table[row, filled : len(pages)] = pages[filled:]
            self._filled[row] = len(pages)
        return row
