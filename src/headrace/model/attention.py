"""The attention function that Transformers calls in every layer, and the probe that checks how it is called."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headrace.core.errors import ModelError
from headrace.model.context import StepContext

#: Name under which `AttentionInterface` knows us, and the forward keyword that carries the step's context.
NAME = "headrace"

#: Keywords that say nothing about the scores of one causal forward over packed rows.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache", "past_key_values", "cache_position", "output_attentions",
                       "output_router_logits", "output_hidden_states", "position_embeddings", "is_causal",
                       "deterministic", "attention_mask", "logits_to_keep", "return_dict"})  # fmt: skip


@dataclass(frozen=True)
class AttentionCall:
    """How one layer calls its attention: head counts, head size, and what `StepContext.attend` is given."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass
class Probe:
    """A step context that attends only within its own few rows and notes every call; used once, at load."""

    calls: dict[int, AttentionCall] = field(default_factory=dict)

    def note(self, module: nn.Module, mask: Tensor | None, keywords: dict[str, Any]) -> None:
        """Refuse a call with keywords that change the scores in a way `attend` does not know."""
        name = type(module).__name__
        if mask is not None:
            raise ModelError(f"{name} builds its own attention mask (ALiBi or a special mask), which is not supported")
        if not getattr(module, "is_causal", True) or keywords.get("is_causal") is False:
            raise ModelError(f"{name} attends in both directions; only causal decoders are supported")
        for key, value in keywords.items():
            if key == "s_aux" and value is not None:
                raise ModelError(f"{name} uses attention sinks, which are not supported")
            if key not in _HARMLESS and value is not None:
                raise ModelError(f"{name} calls attention with {key!r}, which is not supported")

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Note the call and answer with plain causal attention over the probe's rows."""
        if q.shape[-1] != v.shape[-1] or k.shape != v.shape:
            raise ModelError(
                f"layer {layer} has key heads {tuple(k.shape[1:])} and value heads {tuple(v.shape[1:])} "
                "(multi-head latent attention or alike), which is not supported"
            )
        if layer in self.calls:
            raise ModelError(f"layer {layer} attends twice in one forward, which is not supported")
        self.calls[layer] = AttentionCall(q.shape[1], k.shape[1], q.shape[2], scale, window, softcap)
        return dense_causal(q, k, v, scale, window, softcap)


def dense_causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Causal attention where the queries are the last rows of one sequence, by the definition of `attend`.

    Args: q [T, heads, d]; k, v [S, kv_heads, d] with S >= T. Returns [T, heads, d]. Quadratic memory: for probes.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q.float(), keys.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
    key_at = torch.arange(k.shape[0], device=q.device)[None, :]
    hidden = key_at > at
    if window is not None:
        hidden |= key_at <= at - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, values.float()).to(q.dtype)


def headrace_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    headrace: StepContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' signature: query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d]."""
    if headrace is None:
        raise ModelError(f"{type(module).__name__} does not pass forward keywords on to its attention")
    if headrace.__class__ is Probe:
        headrace.note(module, attention_mask, others)
    rows, heads, width = query.shape[2], query.shape[1], query.shape[3]
    out = headrace.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        width**-0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
    )
    return out.view(1, rows, heads, width), None


def register() -> None:
    """Make the name known to Transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, headrace_attention)
