"""What a step hands to every layer's attention."""

from typing import Protocol

from torch import Tensor


class StepContext(Protocol):
    """One step's attention: where its rows live in the KV pool. Travels as a forward keyword, never as a global."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store k and v of the packed rows, then attend causally within each row's own sequence.

        Args:
            layer: index of the decoder layer in the whole model; a span of layers keeps its indices.
            q: [T, heads, head_dim], after rotary embedding; may be a strided view.
            k: [T, kv_heads, head_dim], after rotary embedding; may be a strided view, valid during the call only.
            v: [T, kv_heads, head_dim]; may be a strided view, valid during the call only.
            scale: factor of the scores.
            window: a query at position p sees the keys at positions p - window + 1 .. p; None: all up to p.
            softcap: scores become softcap * tanh(scores / softcap) after scaling, before the mask; None: unchanged.

        Returns:
            [T, heads, head_dim] or [T, heads * head_dim], in the dtype of q.
        """
        ...
