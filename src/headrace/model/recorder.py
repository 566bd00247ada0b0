"""Stand-ins for the decoder's layers, so that the model's own forward prepares and finishes what we run between."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from headrace.model.attention import NAME


@dataclass
class Recording:
    """Travels through the model's forward as its `headrace` keyword, in place of a step context.

    Attributes:
        final: hidden states [1, R, hidden] that the last stand-in gives back, so that norm and head run on them; None:
            the recording is about what enters the layers.
        hidden: what entered the first layer, [1, T, hidden].
        calls: per layer, the positional and keyword arguments that follow the hidden states.
    """

    final: Tensor | None = None
    hidden: Tensor | None = None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class LayerRecorder(nn.Module):
    """Notes how the decoder calls layer `index`; passes hidden states on untouched. Attributes are the layer's own."""

    def __init__(self, layer: nn.Module, index: int, last: bool) -> None:
        super().__init__()
        self.index, self.last = index, last
        # Not a submodule: the real layer is run, moved and counted by the decoder that owns it.
        self.__dict__["layer"] = layer

    def __getattr__(self, name: str) -> Any:
        """Some decoders ask a layer for its type before they call it."""
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Note the call; the last one returns the hidden states to finish, or one row, so that the norm is cheap."""
        recording: Recording = kwargs.pop(NAME)
        if recording.final is not None:
            return recording.final if self.last else hidden
        if not recording.calls:
            recording.hidden = hidden
        recording.calls.append((args, kwargs))
        return hidden[:, :1] if self.last else hidden
