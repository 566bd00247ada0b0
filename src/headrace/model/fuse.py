"""Replaces a layer's norms, MLP and attention by their fused forms where those give the same numbers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.kernels import gemm
from headrace.model.attention import AttentionCall, dense_causal
from headrace.model.fused import FusedAttention, FusedLayer, GatedMlp, RowNorm
from headrace.model.linears import GatedLinear, PackedLinear, is_plain, pack_linears, stack
from headrace.model.release import Weights

#: Largest difference allowed, relative to the largest number of the output; reordered float32 sums stay below 1e-5.
_TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@dataclass
class _Trial:
    """What one submodule was given and gave back in the layer's own forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class _TrialStep:
    """Attends densely within the trial's rows and keeps what the layer handed over."""

    def __init__(self) -> None:
        self.given: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        self.given = (q.clone(), k.clone(), v.clone())
        return dense_causal(q, k, v, scale, window, softcap)


def fuse_layer(
    layer: nn.Module, hidden: Tensor, call: tuple[tuple[Any, ...], dict[str, Any]], attention: AttentionCall,
    index: int, weights: Weights,
) -> tuple[nn.Module, Tensor]:  # fmt: skip
    """Fuse and pack one layer, whose parts are replaced in place.

    Args:
        layer: the decoder layer, unpacked.
        hidden: [1, T, hidden], rows to try the replacements on.
        call: the layer's arguments after the hidden states, as recorded.
        attention: how the layer calls its attention.
        index: of the layer in the whole model.
        weights: gives back what has been packed.

    Returns: the layer to run from now on, and what the layer gave for `hidden` before anything was replaced.
    """
    candidates = {name: module for name, module in layer.named_modules() if _kind(module)}
    step = _TrialStep()
    trials, out = _run(layer, candidates, hidden, call, step)
    # Norms inside an attention go first: the attention takes its head norms in their fused form.
    for name in sorted(trials, key=lambda name: ("norm", "mlp", "attention").index(_kind(candidates[name]) or "")):
        original, trial = candidates[name], trials[name]
        kind = _kind(original)
        replacement: nn.Module | None
        if kind == "norm":
            replacement = _norm(original, trial)
        elif kind == "mlp":
            replacement = _mlp(original, trial)
        else:
            replacement = _attention(original, trial, attention, index, step)
        if replacement is not None:
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, replacement)
            for part in original.modules():
                if is_plain(part):
                    weights.release(part)
    pack_linears(layer, weights)
    return _whole(layer, hidden, call, out) or layer, out


def _whole(layer: Any, hidden: Tensor, call: tuple[tuple[Any, ...], dict[str, Any]], out: Tensor) -> FusedLayer | None:
    """The layer as one piece, where its parts are the usual four and are put together the usual way."""
    parts = {name: part for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
    if parts.keys() != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return None
    first, second = parts["input_layernorm"], parts["post_attention_layernorm"]
    attention, mlp = parts["self_attn"], parts["mlp"]
    if not (isinstance(first, RowNorm) and isinstance(second, RowNorm)):
        return None
    if not (isinstance(attention, FusedAttention) and isinstance(mlp, GatedMlp)):
        return None
    ours = FusedLayer(first, attention, second, mlp)
    return ours if _close(ours(hidden, *call[0], headrace=_TrialStep(), **call[1]), out) else None


def fuse_norm(owner: nn.Module, hidden: Tensor) -> None:
    """Fuse the norm after the last layer, where the decoder calls it `norm`; hidden [1, T, hidden] to try it on."""
    norm = getattr(owner, "norm", None)
    if norm is not None and _kind(norm) == "norm":
        replacement = _norm(norm, _Trial((hidden,), {}, norm(hidden)))
        if replacement is not None:
            owner.norm = replacement


def _kind(module: nn.Module) -> str | None:
    names = {name for name, _ in module.named_children()}
    if not names and "RMSNorm" in type(module).__name__ and set(module._parameters) == {"weight"}:
        return "norm"
    if {"down_proj"} < names and ({"gate_proj", "up_proj"} < names or "gate_up_proj" in names):
        linears = [
            getattr(module, name) for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj") if name in names
        ]
        return "mlp" if all(map(is_plain, linears)) else None
    if "o_proj" in names and ({"q_proj", "k_proj", "v_proj"} < names or "qkv_proj" in names):
        linears = [
            getattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj") if name in names
        ]
        return "attention" if all(map(is_plain, linears)) else None
    return None


def _run(
    layer: nn.Module, candidates: dict[str, nn.Module], hidden: Tensor,
    call: tuple[tuple[Any, ...], dict[str, Any]], step: _TrialStep,
) -> tuple[dict[str, _Trial], Tensor]:  # fmt: skip
    trials: dict[str, _Trial] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            trials[name] = _Trial(args, dict(kwargs), out)

        return hook

    hooks = [module.register_forward_hook(note(name), with_kwargs=True) for name, module in candidates.items()]
    try:
        out = layer(hidden, *call[0], headrace=step, **call[1])
    finally:
        for hook in hooks:
            hook.remove()
    return trials, out[0] if isinstance(out, tuple) else out


def _close(ours: Tensor, theirs: Tensor) -> bool:
    worst = (ours.float() - theirs.float()).abs().max()
    return ours.shape == theirs.shape and bool(worst <= _TOLERANCE[theirs.dtype] * theirs.float().abs().max())


def _norm(original: nn.Module, trial: _Trial) -> RowNorm | None:
    eps = getattr(original, "variance_epsilon", getattr(original, "eps", None))
    weight: Tensor = original.weight  # type: ignore[assignment]
    if eps is None or weight.dtype != torch.float32:
        return None
    x: Tensor = trial.args[0]
    # Small numbers too: there a wrong epsilon shows.
    small = x * 1e-3
    for offset in (0.0, 1.0):
        ours = RowNorm(weight + offset, float(eps))
        if _close(ours(x), trial.out) and _close(ours(small), original(small)):
            return ours
    return None


def _mlp(original: Any, trial: _Trial) -> GatedMlp | None:
    act = getattr(original, "act_fn", None) or getattr(original, "activation_fn", None)
    if act is None:
        return None
    merged = getattr(original, "gate_up_proj", None)
    weight, bias = stack([merged] if merged is not None else [original.gate_proj, original.up_proj])
    down = PackedLinear(original.down_proj.weight, original.down_proj.bias)
    if bias is None and gemm.supported(weight[: len(weight) // 2]):
        panels = gemm.pack_gated(weight)
        for name in ("silu", "gelu_tanh"):
            ours = GatedMlp(GatedLinear(panels, name), down, act)
            if _close(ours(trial.args[0]), trial.out):
                return ours
    ours = GatedMlp(PackedLinear(weight, bias), down, act)
    return ours if _close(ours(trial.args[0]), trial.out) else None


def _attention(
    original: Any, trial: _Trial, call: AttentionCall, index: int, step: _TrialStep
) -> FusedAttention | None:
    if not isinstance(trial.kwargs.get("position_embeddings"), tuple) or trial.args:
        return None
    if "hidden_states" not in trial.kwargs or step.given is None:
        return None
    q_norm, k_norm = getattr(original, "q_norm", None), getattr(original, "k_norm", None)
    if (q_norm is None) != (k_norm is None):
        return None
    merged = getattr(original, "qkv_proj", None)
    parts = [original.q_proj, original.k_proj, original.v_proj] if merged is None else [merged]
    width = (call.heads + 2 * call.kv_heads) * call.head_dim
    if sum(part.weight.shape[0] for part in parts) != width:
        return None
    float32 = parts[0].weight.dtype == torch.float32
    if float32 and q_norm is not None and not (
        isinstance(q_norm, RowNorm) and isinstance(k_norm, RowNorm)
        and q_norm.scale.shape == k_norm.scale.shape == (call.head_dim,) and q_norm.eps == k_norm.eps
    ):  # fmt: skip
        return None
    ours = FusedAttention(
        PackedLinear(*stack(parts)), PackedLinear(original.o_proj.weight, original.o_proj.bias), index,
        call.heads, call.kv_heads, call.head_dim, call.scale, call.window, call.softcap, q_norm, k_norm,
    )  # fmt: skip
    again = _TrialStep()
    try:
        out, _ = ours(**{**trial.kwargs, "headrace": again})
    except (RuntimeError, TypeError, ValueError):
        return None  # Its arguments mean something else here: the layer's own attention stays.
    assert again.given is not None
    same = all(_close(mine, theirs) for mine, theirs in zip(again.given, step.given, strict=True))
    return ours if same and _close(out, trial.out[0]) else None
