"""Linears over weights that oneDNN has packed once, instead of at every call."""

from torch import Tensor, bfloat16, float16, float32, nn, ops

#: Rows that oneDNN lays the weight out for.
_ROWS_HINT = 64


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed for oneDNN; x [..., in] -> [..., out], on CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
        self.bias = None if bias is None else bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        """Plain linear."""
        out: Tensor = ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def pack_linears(module: nn.Module) -> None:
    """Replace every plain `nn.Linear` below `module`, freeing each weight before the next is packed."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and child.weight.dtype in (float32, bfloat16, float16):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)
