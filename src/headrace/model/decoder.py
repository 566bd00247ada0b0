"""A loaded decoder whose layers run in resumable segments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.core.errors import ModelError
from headrace.model.attention import NAME
from headrace.model.context import StepContext
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
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]


class Decoder:
    """A causal Transformers model, run layer by layer over packed rows. Made by `loader.load`.

    Args:
        model: the `...ForCausalLM` module, in eval mode, weights prepared.
        layers: its decoder layers, whose places in the model recorders have taken.

    Attributes:
        shape: its numbers.
    """

    shape: ModelShape

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        self.model, self.layers = model, layers

    @torch.inference_mode()
    def begin(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Forward:
        """Embed the rows and prepare what the layers need.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, each row's position in its own sequence.
            step: travels to every layer's attention.
        """
        recording = Recording()
        self._record(recording, positions, input_ids=input_ids[None])
        assert recording.hidden is not None
        return self._forward(recording, recording.hidden[0], positions, step)

    @torch.inference_mode()
    def begin_span(self, hidden: Tensor, positions: Tensor, step: StepContext, layer: int = 0) -> Forward:
        """Go on from another process's hidden states [T, hidden] before layer `layer`."""
        recording = Recording()
        self._record(recording, positions, inputs_embeds=self._embedding_like(hidden))
        return self._forward(recording, hidden, positions, step, layer)

    @torch.inference_mode()
    def run(self, fwd: Forward, a: int, b: int) -> None:
        """Run layers [a, b) on `fwd`; `a` must be where it stopped."""
        if a != fwd.layer or not a <= b <= len(self.layers):
            raise ValueError(f"layers [{a}, {b}) asked for, but the forward stands before layer {fwd.layer}")
        hidden = fwd.hidden[None]
        for index in range(a, b):
            args, kwargs = fwd.calls[index]
            out = self.layers[index](hidden, *args, headrace=fwd.step, **kwargs)
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
        out = self._record(Recording(final=final), fwd.positions[:1], input_ids=rows.new_zeros((1, 1)), whole=True)
        logits: Tensor = out.logits[0]
        return logits.float()

    def _record(self, recording: Recording, positions: Tensor, whole: bool = False, **inputs: Tensor) -> Any:
        model: Any = self.model if whole else self.model.base_model
        return model(**inputs, position_ids=positions[None], use_cache=False, **{NAME: recording})

    def _embedding_like(self, hidden: Tensor) -> Tensor:
        """The layers' arguments do not depend on it, but its shape must be the embedding's (OPT-350m projects)."""
        width: int = self.model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        return hidden[None] if hidden.shape[1] == width else hidden.new_zeros((1, hidden.shape[0], width))

    def _forward(
        self, recording: Recording, hidden: Tensor, positions: Tensor, step: StepContext, layer: int = 0
    ) -> Forward:
        if len(recording.calls) != len(self.layers):
            raise ModelError(f"the decoder called {len(recording.calls)} of its {len(self.layers)} layers")
        return Forward(hidden, positions, step, layer, recording.calls)


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
        raise ModelError(f"{type(model).__name__} has {len(found)} lists of {count} decoder layers; one is supported")
    return found[0]


def install_recorders(owner: nn.Module) -> list[nn.Module]:
    """Put a stand-in in each layer's place and return the layers."""
    layers = list(owner.layers)  # type: ignore[arg-type]
    owner.layers = nn.ModuleList([LayerRecorder(layer, i, i == len(layers) - 1) for i, layer in enumerate(layers)])
    return layers
