"""The float32 row kernels against torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import rowwise


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 200), scale=st.sampled_from([1e-4, 1.0, 300.0]))
def test_rms_norm(rows: int, width: int, scale: float) -> None:
    x, weight = torch.randn(1, rows, width) * scale, torch.randn(width)
    out = torch.empty_like(x)
    rowwise.rms_norm(x, weight, 1e-5, out, 1)
    wanted = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


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
    rowwise.head_norms(qkv, heads, kv, size, q_weight, k_weight, 1e-6, 1)
    norm = torch.nn.functional.rms_norm
    parts[:, :, :heads] = norm(parts[:, :, :heads], (size,), q_weight.double(), 1e-6)
    parts[:, :, heads : heads + kv] = norm(parts[:, :, heads : heads + kv], (size,), k_weight.double(), 1e-6)
    angle = torch.randn(1, rows, half)
    cos, sin = torch.cat([angle.cos()] * 2, -1).contiguous(), torch.cat([angle.sin()] * 2, -1).contiguous()
    rowwise.rotate(qkv, heads + kv, size, cos, sin, 1)
    turning = parts[:, :, : heads + kv, : 2 * half].clone()
    low, high = turning.chunk(2, -1)
    parts[:, :, : heads + kv, : 2 * half] = turning * cos[:, :, None] + torch.cat([-high, low], -1) * sin[:, :, None]
    torch.testing.assert_close(qkv.double(), parts.flatten(2), rtol=1e-4, atol=1e-5)


def _all_of_them(rows: int, threads: int) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    x, scale = torch.randn(1, rows, 576), torch.randn(576)
    qkv, head_scale = torch.randn(1, rows, 15 * 64), torch.randn(64)
    cos, sin = torch.randn(2, 1, rows, 64)
    normed = torch.empty_like(x)
    rowwise.rms_norm(x, scale, 1e-5, normed, threads)
    rowwise.head_norms(qkv, 9, 3, 64, head_scale, head_scale + 1, 1e-6, threads)
    rowwise.rotate(qkv, 12, 64, cos, sin, threads)
    return [normed, qkv]


@pytest.mark.parametrize("rows", [1, 100, 517])
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_change_a_bit(rows: int, threads: int) -> None:
    alone, together = _all_of_them(rows, 1), _all_of_them(rows, threads)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    x, out = torch.randn(1, 4, 8), torch.empty(1, 4, 8)
    with pytest.raises(TypeError, match="contiguous float32"):
        rowwise.rms_norm(x.half(), torch.ones(8), 1e-5, out, 1)
    with pytest.raises(TypeError, match="contiguous float32"):
        rowwise.rotate(x, 1, 8, torch.ones(1, 1, 8).expand(1, 4, 8), torch.ones(1, 4, 8), 1)
    with pytest.raises(ValueError, match="cannot norm"):
        rowwise.rms_norm(x, torch.ones(7), 1e-5, out, 1)
    with pytest.raises(ValueError, match="cannot turn"):
        rowwise.rotate(x, 1, 8, torch.ones(1, 3, 8), torch.ones(1, 3, 8), 1)
    with pytest.raises(ValueError, match="not 1 \\+ 2 \\* 1 heads"):
        rowwise.head_norms(x, 1, 1, 4, torch.ones(4), torch.ones(4), 1e-5, 1)
