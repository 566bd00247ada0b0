"""Linears over weights that oneDNN has packed once, instead of at every call."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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
    """y = x W^T + b with W packed for oneDNN where the CPU computes in its type; x [..., in] -> [..., out], on CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits = weight.dtype.itemsize * 8
        self.is_packed = can_pack(weight.dtype)
        weight = weight.detach()
        self.packed = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
            if self.is_packed
            else weight.clone()  # The original's pages are given back.
        )
        self.bias = None if bias is None else bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        """Plain linear."""
        if self.is_packed:
            out: Tensor = _linear(x, self.packed, self.bias, "none", [], "")
            return out
        return nn.functional.linear(x, self.packed, self.bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), the sum taken while the product is in registers where it is packed."""
        if self.is_packed:
            out: Tensor = _linear_binary(x, residual, self.packed, self.bias, "add")
            return out
        return residual + self.forward(x)


def is_plain(module: nn.Module | None) -> bool:
    """Whether this is exactly torch's linear over a float weight, not a quantised or adapted one."""
    return type(module) is nn.Linear and module.weight.dtype in _TYPES


def stack(linears: Sequence[nn.Linear]) -> PackedLinear:
    """One linear whose outputs are those of `linears`, one after the other."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return PackedLinear(weight, None)
    filled = [
        linear.weight.new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return PackedLinear(weight, torch.cat(filled))


def pack_linears(module: nn.Module, weights: Weights) -> None:
    """Replace every plain `nn.Linear` below `module`, freeing each weight before the next is packed."""
    for name, child in list(module.named_children()):
        if is_plain(child):
            setattr(module, name, PackedLinear(child.weight, child.bias))  # type: ignore[arg-type]
            weights.release(child)
        else:
            pack_linears(child, weights)
