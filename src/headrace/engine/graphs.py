"""Decode steps of fixed shape: captured once as CUDA graphs, then replayed without a host that launches kernels.

A step in which every sequence adds one token, and no layer waits for stored KV or offers new KV, needs the host only
for its inputs. It is padded to a bucket of rows (and pages), run over buffers that never move, and on CUDA recorded.
The recording has not been run on a GPU yet; the same operations run unrecorded on any device, and are tested so.
"""

import logging
from bisect import bisect_left
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.core.plan import StepPlan
from headrace.engine.batch import StepBatch
from headrace.engine.kv_group import KVGroup
from headrace.kernels.attention import AttentionBackend
from headrace.kernels.static_attention import GatherDecode, static_decode
from headrace.model.decoder import Decoder

_log = logging.getLogger(__name__)


class StaticStep:
    """One bucket's step, and its context (`model.context.StepContext`).

    Args:
        decoder: the model.
        group: its KV.
        attention: over buffers of as many rows as `logits`.
        logits: [rows, vocab] float32 on the decoder's device; `compute` writes it.
    """

    def __init__(self, decoder: Decoder, group: KVGroup, attention: GatherDecode, logits: Tensor) -> None:
        self._decoder, self._group = decoder, group
        self._attention, self._logits = attention, logits
        rows = len(logits)
        self._host = np.zeros((2, rows), np.int64)
        self._inputs = torch.zeros((2, rows), dtype=torch.int64, device=decoder.device)
        self._every = torch.arange(rows, device=decoder.device)

    def load(self, batch: StepBatch) -> None:
        """Fill the buffers with a step of at most as many rows; the others compute token 0 at position 0."""
        n = len(batch.kv_lens)
        self._host[:, n:] = 0
        self._host[0, :n], self._host[1, :n] = batch.input_ids, batch.positions
        self._inputs.copy_(torch.from_numpy(self._host), non_blocking=True)
        self._attention.load(batch.kv_lens, batch.block_tables, batch.slots)

    def compute(self) -> None:
        """From the buffers to `logits`: operations of fixed shapes that wait for nothing, so they can be captured."""
        self._attention.begin()
        ids, positions = self._inputs.unbind(0)
        forward = self._decoder.begin(ids, positions, self)
        self._decoder.run(forward, 0, self._decoder.shape.num_layers)
        self._logits.copy_(self._decoder.logits(forward, self._every))
        self._attention.begin()  # what it derived lies in the graph's memory: not to be kept alive from here

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `model.context.StepContext.attend`."""
        k_planes, v_planes = self._group.planes(layer)
        self._attention.write(k, v, k_planes, v_planes)
        return self._attention.attend(q, k_planes, v_planes, scale=scale, window=window, softcap=softcap)


class Graph(Protocol):
    """A step's operations, recorded."""

    def replay(self) -> None:
        """Run them again over the same memory, whatever it holds now."""
        ...


class Recorder(Protocol):
    """Records steps, such as `GraphRecorder` does."""

    def record(self, step: StaticStep) -> Graph:
        """Record `step.compute`; the step is loaded.

        Raises:
            RuntimeError: it does something that cannot be recorded; it can still be computed.
        """
        ...


class DecodePath:
    """Runs plans that are nothing but decode. Buckets are made, and recorded, when a plan first needs them.

    Graphs hold the addresses of the group's planes, so a group that gives layers away must not be used with it again.
    One plan at a time: the logits of a plan are overwritten by the next.

    Args:
        decoder: the whole model, on one device.
        group: its KV, in device planes.
        backend: made the group's planes.
        max_num_seqs: most rows of a step.
        max_model_len: most tokens of a sequence.
        recorder: records steps; without one they run as they are.
        most_copied: bytes of KV that a layer may copy at once, where attention does that; larger steps are not taken.

    Raises:
        ConfigError: the KV lies in planes that only the host's kernels read.
    """

    def __init__(
        self,
        decoder: Decoder,
        group: KVGroup,
        backend: AttentionBackend,
        max_num_seqs: int,
        max_model_len: int,
        recorder: Recorder | None = None,
        most_copied: int = 2 << 30,
    ) -> None:
        if group.scratch_page is None:
            raise ConfigError(f"decode of fixed shape needs KV in device planes, not in those of '{backend.name}'")
        shape = decoder.shape
        self._decoder, self._group, self._scratch_page = decoder, group, group.scratch_page
        self._kind = static_decode(backend, shape.dtype, group.shape.dtype, shape.head_dim)
        self._buckets = row_buckets(max_num_seqs)
        self._most_pages = -(-max_model_len // group.shape.page_size) + 1
        self._logits = torch.zeros(self._buckets[-1], shape.vocab_size, device=decoder.device)
        self._steps: dict[tuple[int, int], StaticStep] = {}
        self._recorder = recorder
        self._graphs: dict[tuple[int, int], Graph] = {}
        page_bytes = group.shape.page_bytes // len(group.shape.layers)
        self._most_copied_pages = most_copied // page_bytes if self._kind.copies else None
        self._usable = True

    def accepts(self, plan: StepPlan) -> bool:
        """Whether the plan is one new token for each of its sequences, nothing else, and not too large to copy."""
        if not self._usable:
            return False
        if any(chunk.phase != "decode" or chunk.length != 1 or chunk.sample != 1 for chunk in plan.chunks):
            return False
        if self._most_copied_pages is None:
            return True
        longest = max(chunk.end for chunk in plan.chunks)
        rows, pages = self._key(len(plan.chunks), -(-longest // self._group.shape.page_size))
        return rows * pages <= self._most_copied_pages

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        """Compute an accepted plan's batch; returns logits [n, vocab] float32, valid until the next call."""
        n = len(batch.kv_lens)
        key = self._key(n, batch.block_tables.shape[1])
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._make(*key)
        step.load(batch)
        graph = self._graphs.get(key)
        if graph is None and self._recorder is not None:
            graph = self._record(key, step, self._recorder)
        if graph is None:
            step.compute()
        else:
            graph.replay()
        return self._logits[:n]

    def _key(self, rows: int, pages: int) -> tuple[int, int]:
        return (
            next(bucket for bucket in self._buckets if bucket >= rows),
            self._kind.page_bucket(pages, self._most_pages),
        )

    def _make(self, rows: int, pages: int) -> StaticStep:
        size, device = self._group.shape.page_size, self._decoder.device
        attention = self._kind(rows, pages, size, self._scratch_page, device)
        return StaticStep(self._decoder, self._group, attention, self._logits[:rows])

    def _record(self, key: tuple[int, int], step: StaticStep, recorder: Recorder) -> Graph | None:
        try:
            graph = self._graphs[key] = recorder.record(step)
        except RuntimeError as error:  # a model that waits for the device in the middle of a step
            reason = (str(error) or type(error).__name__).splitlines()[0]
            _log.warning(
                "decode steps run without CUDA graphs: %d rows of %d pages cannot be recorded: %s", *key, reason
            )
            self._usable, self._recorder = False, None
            return None
        return graph


class GraphRecorder:
    """Records steps as CUDA graphs that share one pool of memory: they are replayed one at a time.

    Args: device: a CUDA device. Not run on a GPU yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: StaticStep) -> Graph:
        """Run the step twice, so that libraries make their plans and workspaces, then capture it; see `Recorder`."""
        outside = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):  # entered here, so that it is left also when a capture ends badly
            for _ in range(2):
                step.compute()
            # Other threads of a Python user's process may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                step.compute()
        outside.wait_stream(self._stream)
        return graph


def row_buckets(most: int) -> list[int]:
    """Numbers of rows that steps are made for, ascending: powers of two, and from 8 on one between each two; the last
    is at least `most`."""
    powers = most.bit_length() + 1
    sizes = sorted([1 << p for p in range(powers)] + [3 << p for p in range(2, powers)])
    return sizes[: bisect_left(sizes, most) + 1]
