"""Modules that take the place of a layer's norms, MLP and attention, with fewer and larger operations.

float32 uses the kernels of `kernels.rowwise` and `kernels.gemm`; 16-bit types use torch between the packed linears.
`fuse` puts one in place only where it gives the numbers of the module it replaces.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.kernels import openmp, rowwise
from headrace.model.context import StepContext
from headrace.model.linears import GatedLinear, PackedLinear


class RowNorm(nn.Module):
    """RMS norm over the last axis of a contiguous float32 tensor: x / sqrt(mean(x^2) + eps) * scale, scale [n]."""

    def __init__(self, scale: Tensor, eps: float) -> None:
        super().__init__()
        self.scale = scale.detach().float().clone().contiguous()
        self.eps, self.threads = eps, openmp.check(0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> the same shape."""
        if x.dim() != 3:
            return self.forward(x.reshape(1, -1, x.shape[-1])).view(x.shape)
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty_like(x)
        rowwise.rms_norm(x, self.scale, self.eps, out, self.threads)
        return out


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up in one linear.

    Args:
        gate_up: the two weights, one above the other: with the activation in it, or without.
        down: back to the residual stream.
        act: the activation where `gate_up` is without.
    """

    def __init__(
        self, gate_up: GatedLinear | PackedLinear, down: PackedLinear, act: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.gate_up, self.down, self.act = gate_up, down, act

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        return self.down.forward(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """act(gate(x)) * up(x): x [..., hidden] -> [..., intermediate]."""
        both = self.gate_up.forward(x)
        if isinstance(self.gate_up, GatedLinear):
            return both
        gate, up = both.chunk(2, -1)
        return self.act(gate) * up


class FusedAttention(nn.Module):
    """Rotary grouped-query attention with q, k and v in one linear.

    Args:
        qkv: the three weights, one above the other.
        out: output projection.
        layer: index of the layer in the whole model.
        heads, kv_heads, head_dim: as the layer calls attention.
        scale, window, softcap: given to `StepContext.attend`.
        q_norm, k_norm: RMS norms of each head, or None.
    """

    def __init__(
        self,
        qkv: PackedLinear,
        out: PackedLinear,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.q_norm, self.k_norm = qkv, out, q_norm, k_norm
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        self.scale, self.window, self.softcap = scale, window, softcap
        self.by_kernel = qkv.bits == 32
        self.threads = openmp.check(0) if self.by_kernel else 1

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        headrace: StepContext,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, hidden]; position_embeddings: cos and sin [1, T, r]."""
        return self.out.forward(self.attended(hidden_states, position_embeddings, headrace)), None

    def attended(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], step: StepContext) -> Tensor:
        """Attention before its output projection: x [1, T, hidden] -> [1, T, heads * head_dim]."""
        both = self.qkv.forward(x)
        rows, heads, turning = both.shape[1], self.heads, self.heads + self.kv_heads
        parts = both.view(rows, turning + self.kv_heads, self.head_dim)
        cos, sin = position_embeddings
        if self.by_kernel:
            if isinstance(self.q_norm, RowNorm) and isinstance(self.k_norm, RowNorm):
                q_scale, k_scale = self.q_norm.scale, self.k_norm.scale
                rowwise.head_norms(
                    both, heads, self.kv_heads, self.head_dim, q_scale, k_scale, self.q_norm.eps, self.threads
                )
            rowwise.rotate(both, turning, self.head_dim, cos, sin, self.threads)
            q, k = parts[:, :heads], parts[:, heads:turning]
        else:
            q, k = parts[:, :heads], parts[:, heads:turning]
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = _turn(q, cos[0, :, None], sin[0, :, None]), _turn(k, cos[0, :, None], sin[0, :, None])
        out = step.attend(self.layer, q, k, parts[:, turning:], self.scale, self.window, self.softcap)
        return out.reshape(1, rows, heads * self.head_dim)


class FusedLayer(nn.Module):
    """The plain pre-norm layer: x + attention(norm(x)), then that + mlp(norm(that)), of fused parts."""

    def __init__(self, first: RowNorm, attention: FusedAttention, second: RowNorm, mlp: GatedMlp) -> None:
        super().__init__()
        self.first, self.attention, self.second, self.mlp = first, attention, second, mlp

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        headrace: StepContext,
        **__: Any,
    ) -> Tensor:
        """hidden_states [1, T, hidden] -> a new tensor of that shape."""
        attended = self.attention.attended(self.first.forward(hidden_states), position_embeddings, headrace)
        middle = self.attention.out.added_to(hidden_states, attended)
        return self.mlp.down.added_to(middle, self.mlp.inner(self.second.forward(middle)))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Split-half rotary embedding of x [T, heads, d] by cos, sin [T, 1, r], r <= d."""
    width = cos.shape[-1]
    front = x[..., :width]
    low, high = front.chunk(2, -1)
    turned = front * cos + torch.cat((-high, low), -1) * sin
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)
