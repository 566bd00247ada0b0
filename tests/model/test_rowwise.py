"""The float32 row kernels against torch in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model import rowwise


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 200), scale=st.sampled_from([1e-4, 1.0, 300.0]))
def test_rms_norm(rows: int, width: int, scale: float) -> None:
    x, weight = torch.randn(1, rows, width) * scale, torch.randn(width)
    out = torch.empty_like(x)
    rowwise.rms_norm(x.numpy(), weight.numpy(), np.float32(1e-5), out.numpy())
    wanted = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "act"),
    [
        (rowwise.silu_gate, torch.nn.functional.silu),
        (rowwise.gelu_tanh_gate, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_gates(kernel, act) -> None:
    values = torch.cat([torch.linspace(-120, 120, 2001), torch.tensor([0.0, -0.0, 1e-30, -1e-6, 1e4, -1e4])])
    gate_up = torch.stack([values, torch.linspace(-3, 3, len(values))]).reshape(1, 1, -1).contiguous()
    out = torch.empty(1, 1, len(values))
    kernel(gate_up.numpy(), out.numpy())
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(out.double(), act(gate) * up, rtol=1e-5, atol=1e-6)


def test_gates_keep_nan() -> None:
    gate_up, out = torch.tensor([[[float("nan"), 1.0, 1.0, 1.0]]]), torch.empty(1, 1, 2)
    rowwise.silu_gate(gate_up.numpy(), out.numpy())
    assert bool(torch.isnan(out[0, 0, 0]))
    assert not bool(torch.isnan(out[0, 0, 1]))


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 4),
    kv=st.integers(1, 2),
    half=st.integers(1, 9),
    rest=st.integers(0, 3),
)
def test_head_norms_and_rotation(rows: int, heads: int, kv: int, half: int, rest: int) -> None:
    size = 2 * half + rest
    qkv = torch.randn(1, rows, (heads + 2 * kv) * size)
    parts = qkv.double().view(1, rows, heads + 2 * kv, size).clone()
    q_weight, k_weight = torch.randn(size), torch.randn(size)
    rowwise.head_norms(qkv.numpy(), heads, kv, size, q_weight.numpy(), k_weight.numpy(), np.float32(1e-6))
    norm = torch.nn.functional.rms_norm
    parts[:, :, :heads] = norm(parts[:, :, :heads], (size,), q_weight.double(), 1e-6)
    parts[:, :, heads : heads + kv] = norm(parts[:, :, heads : heads + kv], (size,), k_weight.double(), 1e-6)
    angle = torch.randn(1, rows, half)
    cos, sin = torch.cat([angle.cos()] * 2, -1).contiguous(), torch.cat([angle.sin()] * 2, -1).contiguous()
    rowwise.rotate(qkv.numpy(), heads + kv, size, cos.numpy(), sin.numpy())
    turning = parts[:, :, : heads + kv, : 2 * half].clone()
    low, high = turning.chunk(2, -1)
    parts[:, :, : heads + kv, : 2 * half] = turning * cos[:, :, None] + torch.cat([-high, low], -1) * sin[:, :, None]
    torch.testing.assert_close(qkv.double(), parts.flatten(2), rtol=1e-4, atol=1e-5)
