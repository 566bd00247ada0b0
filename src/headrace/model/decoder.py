"""A loaded decoder whose layers run in resumable segments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.core.errors import ModelError
from headrace.model.arguments import ArgumentTables, Call
from headrace.model.attention import NAME
from headrace.model.context import StepContext
from headrace.model.ends import Head, find_embedding, find_head
from headrace.model.recorder import LayerRecorder, Recording
from headrace.model.shape import ModelShape


@dataclass
class Forward:
    """One pass of packed rows through the layers, stopped between two of them.

    Attributes:
        hidden: [T, hidden], the residual stream before layer `layer`. May be read or replaced between runs.
        positions: [T], the position of each row in its own sequence.
        step: the attention context.
        layer: the next layer to run.
        calls: per layer, its arguments after the hidden states.
    """

    hidden: Tensor
    positions: Tensor
    step: StepContext
    layer: int
    calls: list[Call]


class Decoder:
    """A causal Transformers model, run layer by layer over packed rows. Made by `loader.load`.

    Args:
        model: the `...ForCausalLM` module, in eval mode.
        owner: its part that holds the decoder layers; recorders take their places.

    Attributes:
        shape: its numbers, once they are known.
        layers: the decoder layers.
    """

    shape: ModelShape

    def __init__(self, model: nn.Module, owner: nn.Module) -> None:
        self.model, self.owner = model, owner
        self.layers = install_recorders(owner)
        self.embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self.device: torch.device = next(model.parameters()).device
        self._tables: ArgumentTables | None = None
        self._direct: nn.Module | None = None
        self._head: Head | None = None

    @torch.inference_mode()
    def shorten(self) -> None:
        """Take short ways into and out of the layers where they give the same; call when weights are in place."""
        device = self.device
        self._direct = find_embedding(self.model, self._embed, device)
        try:
            self._tables = ArgumentTables(self._record_calls, self.shape.max_position, device)
        except ValueError:
            self._tables = None  # Learned or token-dependent arguments: the decoder's own forward prepares them.
        hidden = self._embed(torch.tensor([1, 0, 2, 3], device=device))
        self._head = find_head(self.model, self.owner, self._finish, hidden)

    @torch.inference_mode()
    def begin(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Forward:
        """Embed the rows and prepare what the layers need.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, each row's position in its own sequence.
            step: travels to every layer's attention.
        """
        calls = self._tables.calls(positions) if self._tables is not None and self._direct is not None else None
        if calls is not None and self._direct is not None:
            return Forward(self._direct(input_ids), positions, step, 0, calls)
        recording = self._record(Recording(), positions, input_ids=input_ids[None])
        assert recording.hidden is not None
        return Forward(recording.hidden[0], positions, step, 0, recording.calls)

    @torch.inference_mode()
    def begin_span(self, hidden: Tensor, positions: Tensor, step: StepContext, layer: int = 0) -> Forward:
        """Go on from another process's hidden states [T, hidden] before layer `layer`."""
        calls = self._tables.calls(positions) if self._tables is not None else None
        return Forward(hidden, positions, step, layer, self._record_calls(positions) if calls is None else calls)

    @torch.inference_mode()
    def run(self, fwd: Forward, a: int, b: int) -> None:
        """Run layers [a, b) on `fwd`; `a` must be where it stopped."""
        if a != fwd.layer or not a <= b <= len(self.layers):
            raise ValueError(f"layers [{a}, {b}) asked for, but the forward stands before layer {fwd.layer}")
        hidden, step = fwd.hidden[None], fwd.step
        for index in range(a, b):
            args, kwargs = fwd.calls[index]
            out = self.layers[index].forward(hidden, *args, headrace=step, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
        fwd.hidden, fwd.layer = hidden[0], b

    @torch.inference_mode()
    def logits(self, fwd: Forward, rows: Tensor) -> Tensor:
        """Final norm and head for some rows.

        Args: rows: [R] int64, indices into the packed rows. Returns: [R, vocab] float32.
        """
        if fwd.layer != len(self.layers):
            raise ValueError(f"logits asked for, but the forward stands before layer {fwd.layer}")
        final = fwd.hidden.index_select(0, rows)[None]
        return (self._head or self._finish)(final)[0].float()

    def _finish(self, final: Tensor) -> Tensor:
        """Logits [1, R, vocab] of final hidden states [1, R, hidden] by the model's own forward."""
        zero = torch.zeros(1, dtype=torch.int64, device=final.device)
        out = self._forward(Recording(final=final), self.model, zero, input_ids=zero[None])
        logits: Tensor = out.logits
        return logits

    def _embed(self, input_ids: Tensor) -> Tensor:
        """What enters the first layer, [1, T, hidden], at positions that would show if they were added."""
        positions = torch.arange(len(input_ids), device=input_ids.device) + 1
        hidden = self._record(Recording(), positions, input_ids=input_ids[None]).hidden
        assert hidden is not None
        return hidden

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables from which the layers' arguments are looked up; they grow with the longest sequence."""
        return self._tables.nbytes if self._tables is not None else 0

    def _record_calls(self, positions: Tensor) -> list[Call]:
        """Each layer's arguments at these positions; they do not depend on tokens (`probe` has made sure)."""
        return self._record(Recording(), positions, input_ids=torch.zeros_like(positions)[None]).calls

    def _record(self, recording: Recording, positions: Tensor, **inputs: Tensor) -> Recording:
        self._forward(recording, self.model.base_model, positions, **inputs)
        if len(recording.calls) != len(self.layers):
            raise ModelError(f"the decoder called {len(recording.calls)} of its {len(self.layers)} layers")
        return recording

    def _forward(self, recording: Recording, model: Any, positions: Tensor, **inputs: Tensor) -> Any:
        return model(**inputs, position_ids=positions[None], use_cache=False, **{NAME: recording})


def find_layers(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The module that owns the decoder's layers, and the list: the only `layers` as long as the configuration says.

    Raises: ModelError where there is none, or several.
    """
    count = getattr(model.config, "num_hidden_layers", 0)
    found = [
        (owner, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if name == "layers" and isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(found) != 1:
        raise ModelError(
            f"{type(model).__name__} has {len(found)} lists named `layers` of {count} decoder layers instead of one; "
            "this architecture is not supported"
        )
    return found[0]


def install_recorders(owner: nn.Module) -> list[nn.Module]:
    """Put a stand-in in each layer's place and return the layers."""
    layers = list(owner.layers)  # type: ignore[arg-type]
    owner.layers = nn.ModuleList([LayerRecorder(layer, i, i == len(layers) - 1) for i, layer in enumerate(layers)])
    return layers
