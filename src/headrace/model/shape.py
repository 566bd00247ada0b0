"""The plain numbers of a loaded model."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from headrace.model.attention import AttentionCall


@dataclass(frozen=True)
class ModelShape:
    """What others need to know of a decoder.

    Attributes:
        num_layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: inner width of one token's MLP (active experts together).
        heads, kv_heads, head_dim: attention, the same in all layers.
        vocab_size: columns of the logits.
        windows: per layer, tokens a query looks back on (itself included); None: all.
        softcaps: per layer, soft-cap of the scores; None: none.
        params: all weights, a tied head counted once.
        linear_params: weights that multiply every token: attention and MLP, active experts only; no embedding, no head.
        active_params: `linear_params` plus norms and the head.
        head_params: weights of the head, vocabulary times hidden.
        weight_bytes: bytes of the weights as computed with (a packed tied head counted beside its embedding).
        max_position: the longest sequence in tokens this engine serves.
        dtype: `float32`, `bfloat16` or `float16`.
        eos_ids: token ids that end a text.
        fingerprint: hex digest of weights, configuration, dtype and format; KV is shared only under the same one.
    """

    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    softcaps: tuple[float | None, ...]
    params: int
    linear_params: int
    active_params: int
    head_params: int
    weight_bytes: int
    max_position: int
    dtype: str
    eos_ids: tuple[int, ...]
    fingerprint: str

    @property
    def itemsize(self) -> int:
        """Bytes of one weight or activation."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_values_per_token(self) -> int:
        """Numbers of K and V that one token adds over all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim


def count_shape(
    model: nn.Module,
    layers: list[nn.Module],
    config: Any,
    calls: list[AttentionCall],
    max_position: int,
    eos_ids: tuple[int, ...],
    fingerprint: str,
    packed: bool,
) -> ModelShape:
    """Count a model's weights before they are packed; `packed`: a tied head will get a copy of its own."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    experts = count_experts(config)
    per_token = int(getattr(config, "num_experts_per_tok", 0) or 0)
    linear = norms = inner = 0
    whole = sum(weight.numel() for layer in layers for weight in layer.parameters())
    for layer in layers:
        for weight in layer.parameters():
            if weight.dim() == 3 and experts and weight.shape[0] == experts:
                linear += weight.numel() // experts * per_token
                inner = max(inner, min(weight.shape[1:]) * per_token)
            elif weight.dim() >= 2:
                linear += weight.numel()
            else:
                norms += weight.numel()
    inside = {id(weight) for layer in layers for weight in layer.parameters()}
    outside = sum(weight.numel() for weight in model.parameters() if id(weight) not in inside)
    tied = head.weight is embedding.weight
    dtype = embedding.weight.dtype
    first = calls[0]
    copies = head.weight.numel() if tied and packed else 0
    return ModelShape(
        num_layers=len(layers),
        hidden=int(config.hidden_size),
        intermediate=inner or int(getattr(config, "intermediate_size", 0) or getattr(config, "ffn_dim", 0)),
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        vocab_size=int(head.weight.shape[0]),
        windows=tuple(call.window for call in calls),
        softcaps=tuple(call.softcap for call in calls),
        params=whole + outside,
        linear_params=linear,
        active_params=linear + norms + head.weight.numel(),
        head_params=head.weight.numel(),
        weight_bytes=(whole + outside + copies) * dtype.itemsize,
        max_position=max_position,
        dtype=str(dtype).removeprefix("torch."),
        eos_ids=eos_ids,
        fingerprint=fingerprint,
    )


def count_experts(config: Any) -> int:
    """Experts of a mixture-of-experts configuration; 0: it is dense."""
    return int(getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0) or 0)
