"""Products by packed weights against torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import gemm


def _close(ours: Tensor, theirs: Tensor, relative: float = 3e-6) -> None:
    assert ours.shape == theirs.shape
    assert bool((ours - theirs).abs().max() <= relative * theirs.abs().max().clamp(min=1e-30))


shapes = {"vectors": st.integers(1, 12), "k": st.integers(1, 90), "rows": st.integers(1, 40)}


@settings(max_examples=40, deadline=None)
@given(**shapes, plus=st.sampled_from(["nothing", "bias", "residual"]), threads=st.integers(1, 2))
def test_linear(vectors: int, k: int, rows: int, plus: str, threads: int) -> None:
    n = 16 * vectors
    weight, x = torch.randn(n, k), torch.randn(1, rows, k)
    added = {"nothing": None, "bias": torch.randn(n), "residual": torch.randn(1, rows, n)}[plus]
    wanted = x.double() @ weight.double().T + (0 if added is None else added)
    _close(gemm.linear(x, gemm.pack(weight), added, threads), wanted)


@pytest.mark.parametrize(("n", "k", "rows"), [(112, 9000, 12), (1040, 300, 300), (16, 4000, 200)])
def test_blocks_of_k_and_of_rows(n: int, k: int, rows: int) -> None:
    """Weights whose panels exceed the cache, and so few panels that the rows are shared out too."""
    weight, x, residual = torch.randn(n, k), torch.randn(1, rows, k), torch.randn(1, rows, n)
    wanted = x.double() @ weight.double().T + residual
    _close(gemm.linear(x, gemm.pack(weight), residual, 2), wanted, 1e-5)


@settings(max_examples=25, deadline=None)
@given(**shapes, act=st.sampled_from(["silu", "gelu_tanh"]))
def test_gated(vectors: int, k: int, rows: int, act: str) -> None:
    n = 16 * vectors
    weight, x = torch.randn(2 * n, k), torch.randn(1, rows, k)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    apply = torch.nn.functional.silu if act == "silu" else lambda y: torch.nn.functional.gelu(y, approximate="tanh")
    _close(gemm.gated(x, gemm.pack_gated(weight), act, 2), apply(gate) * up, 1e-5)


def test_gated_many_rows() -> None:
    weight, x = torch.randn(192, 33), torch.randn(1, 500, 33)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    _close(gemm.gated(x, gemm.pack_gated(weight), "silu", 2), torch.nn.functional.silu(gate) * up, 1e-5)


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations_over_their_whole_range(name, act) -> None:
    """The gate is the row itself (a weight of one column), the other half is 1."""
    values = torch.cat([torch.linspace(-120, 120, 2001), torch.tensor([0.0, -0.0, 1e-30, -1e-6, 1e4, -1e4])])
    x = torch.stack([values, torch.ones_like(values)], -1)[None]
    weight = torch.cat([torch.tensor([1.0, 0.0]).expand(16, 2), torch.tensor([0.0, 1.0]).expand(16, 2)])
    out = gemm.gated(x.contiguous(), gemm.pack_gated(weight), name, 1)
    wanted = act(values.double())[None, :, None].expand(1, -1, 16)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(1, 12, 8)
    x[0, 4, 3] = float("nan")
    for out in (
        gemm.linear(x, gemm.pack(torch.randn(32, 8)), None, 2),
        gemm.gated(x, gemm.pack_gated(torch.randn(32, 8)), "silu", 2),
    ):
        assert torch.isnan(out[0]).any(-1).tolist() == [row == 4 for row in range(12)]


@settings(max_examples=20, deadline=None)
@given(first=st.integers(0, 30), count=st.integers(1, 30), threads=st.integers(1, 2))
def test_a_row_does_not_depend_on_its_neighbours(first: int, count: int, threads: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 60, 70), torch.randn(96, 70)
    for run, packed in (
        (lambda x, p: gemm.linear(x, p, None, threads), gemm.pack(weight)),
        (lambda x, p: gemm.gated(x, p, "silu", threads), gemm.pack_gated(weight)),
    ):
        assert torch.equal(run(x, packed)[:, first : first + count], run(x[:, first : first + count], packed))


def test_no_rows() -> None:
    assert gemm.linear(torch.empty(1, 0, 8), gemm.pack(torch.randn(16, 8)), None, 2).shape == (1, 0, 16)


def test_what_does_not_fit_is_refused() -> None:
    packed = gemm.pack(torch.randn(32, 8))
    with pytest.raises(TypeError, match="float64"):
        gemm.linear(torch.randn(1, 2, 8).double(), packed, None, 1)
    with pytest.raises(ValueError, match="rows of 9"):
        gemm.linear(torch.randn(1, 2, 9), packed, None, 1)
    with pytest.raises(ValueError, match="cannot add"):
        gemm.linear(torch.randn(1, 2, 8), packed, torch.randn(1, 3, 32), 1)
    with pytest.raises(ValueError, match="do not fit"):
        gemm.gated(torch.randn(1, 2, 8), packed, "silu", 1)
    assert not gemm.supported(torch.randn(33, 8))
    assert not gemm.supported(torch.randn(32, 8).bfloat16())
