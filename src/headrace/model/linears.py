"""Linears over weights that are packed once, instead of at every call: float32 for our kernels, 16 bits for oneDNN."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.kernels import gemm, openmp
from headrace.model.release import Weights

#: Rows that oneDNN lays the weight out for; 8 to 512 give the same layout and rate, 1 is slower from 8 rows on.
_ROWS_HINT = 64

_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in this type on this CPU; otherwise torch's plain linear is the way."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed where there is a kernel for its type; x [..., in] -> [..., out], on CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach()
        self.bits = weight.dtype.itemsize * 8
        self.bias = None if bias is None else bias.detach().clone()
        self.threads = openmp.check(0)
        self.panels = gemm.pack(weight) if gemm.supported(weight) else None
        self.is_packed = self.panels is None and can_pack(weight.dtype)
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        elif self.panels is None:
            self.weight = weight.clone()  # The original's pages are given back.

    def forward(self, x: Tensor) -> Tensor:
        """Plain linear."""
        out: Tensor
        if self.panels is not None:
            return gemm.linear(x, self.panels, self.bias, self.threads)
        if self.is_packed:
            out = _linear(x, self.weight, self.bias, "none", [], "")
            return out
        return nn.functional.linear(x, self.weight, self.bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), the sum taken while the product is in registers where it is packed."""
        out: Tensor
        if self.panels is not None:
            out = gemm.linear(x, self.panels, residual, self.threads)
            return out if self.bias is None else out.add_(self.bias)
        if self.is_packed:
            out = _linear_binary(x, residual, self.weight, self.bias, "add")
            return out
        return residual + self.forward(x)


class GatedLinear(nn.Module):
    """act(x G^T) * (x U^T) in one product; x [..., in] -> [..., out], float32 on CPU.

    Args:
        panels: G above U, from `kernels.gemm.pack_gated`.
        act: `silu` or `gelu_tanh`.
    """

    def __init__(self, panels: gemm.PackedWeight, act: str) -> None:
        super().__init__()
        self.panels, self.act, self.threads = panels, act, openmp.check(0)

    def forward(self, x: Tensor) -> Tensor:
        """The gated product."""
        return gemm.gated(x, self.panels, self.act, self.threads)


def is_plain(module: nn.Module | None) -> bool:
    """Whether this is exactly torch's linear over a float weight, not a quantised or adapted one."""
    return type(module) is nn.Linear and module.weight.dtype in _TYPES


def stack(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one linear whose outputs are those of `linears`, one after the other."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return weight, None
    filled = [
        linear.weight.new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return weight, torch.cat(filled)


def pack_linears(module: nn.Module, weights: Weights) -> None:
    """Replace every plain `nn.Linear` below `module`, freeing each weight before the next is packed."""
    for name, child in list(module.named_children()):
        if is_plain(child):
            setattr(module, name, PackedLinear(child.weight, child.bias))  # type: ignore[arg-type]
            weights.release(child)
        else:
            pack_linears(child, weights)
