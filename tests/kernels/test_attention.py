"""Paged attention equals dense attention, for every backend that runs on CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batch import PagedBatch, empty_planes, worst
from transformers import masking_utils

from headrace.core.errors import ConfigError
from headrace.kernels import cpu
from headrace.kernels.attention import AttentionBackend, backend_for

BACKENDS = {
    "numba": backend_for("cpu", threads=2),
    "serial": backend_for("cpu", threads=1),
    "torch": backend_for("cpu", name="torch"),
}
TOLERANCE = 1e-5
"""Outputs are averages of unit normals; float32 rounding of the scores dominates."""


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, int]:
    """Rows and length of a sequence: decode, a few rows, or a chunk."""
    length = draw(st.one_of(st.integers(1, 80), st.integers(200, 900)))
    rows = draw(st.one_of(st.just(1), st.integers(0, 6), st.integers(1, length)))
    return min(rows, length), length


@pytest.mark.parametrize("name", ["numba", "torch"])
@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(sequences(), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([8, 16, 24, 64, 80, 96, 128, 256]),
    page_size=st.sampled_from([8, 16, 32, 64]),
    window=st.one_of(st.none(), st.integers(1, 700)),
    softcap=st.one_of(st.none(), st.sampled_from([1.0, 50.0])),
    seed=st.integers(0, 1 << 16),
)
def test_equals_dense_attention(
    name: str,
    batch: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    page_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    paged = PagedBatch(BACKENDS[name], batch, kv_heads, group, dim, page_size, seed=seed)
    if name == "torch":  # the fallback reads whole pages, so it needs finite memory
        for planes in paged.planes:
            torch.nan_to_num_(planes)
    found, wanted = paged.attend(window=window, softcap=softcap), paged.dense(window, softcap)
    assert worst(found, wanted) < TOLERANCE


def test_window_is_that_of_transformers() -> None:
    window, length = 7, 40
    paged = PagedBatch(BACKENDS["numba"], [(length, length)], kv_heads=1, group=1)
    overlay = masking_utils.sliding_window_causal_mask_function(window)
    zero = torch.tensor(0)
    seen = torch.tensor(
        [[bool(overlay(zero, zero, torch.tensor(i), torch.tensor(j))) for j in range(length)] for i in range(length)]
    )
    scores = (paged.q[0][:, 0].double() @ paged.k[0][:, 0].double().T) * paged.dim**-0.5
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ paged.v[0][:, 0].double()
    assert worst([paged.attend(window=window)[0][:, 0]], [wanted]) < TOLERANCE


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_does_not_depend_on_the_batch(window: int | None) -> None:
    """Bit by bit: alone or together, decoded or in chunks of any size, on one thread or two."""
    lengths = [700, 33, 1040, 256]
    paged = PagedBatch(BACKENDS["numba"], [(length, length) for length in lengths])
    whole = paged.attend(window=window)
    for backend in (BACKENDS["numba"], BACKENDS["serial"]):
        paged.backend = backend
        for i, length in enumerate(lengths):
            for rows in (1, 2, 5, 17, length // 2):
                (alone,) = paged.attend([(rows, length)], [i], window=window)
                assert torch.equal(alone, whole[i][-rows:])
        mixed = paged.attend([(1, 700), (33, 33), (7, 1000), (1, 255)], window=window)
        assert torch.equal(mixed[2], whole[2][993:1000])
        assert torch.equal(mixed[3], whole[3][254:255])


def test_registers_of_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile shape of machines without AVX-512."""
    monkeypatch.setattr(cpu, "_lanes", lambda: (8, 2))
    paged = PagedBatch(BACKENDS["numba"], [(1, 700), (130, 300), (5, 5)], group=4, dim=80)
    assert worst(paged.attend(window=200), paged.dense(200)) < TOLERANCE


def test_memory_after_a_sequence_is_never_read() -> None:
    """NaN in unwritten slots, in foreign pages and behind wild table entries reaches no output."""
    paged = PagedBatch(BACKENDS["numba"], [(1, 5), (3, 300), (60, 61)])
    assert all(torch.isfinite(out).all() for out in paged.attend())
    paged.tables[1, : 200 // 16] = -(1 << 30)  # pages wholly before the window may be gone
    assert worst(paged.attend(window=90), paged.dense(90)) < TOLERANCE


def test_heads_are_independent() -> None:
    """A plane array of some kv heads, with the query heads that belong to them, gives the same bits."""
    paged = PagedBatch(BACKENDS["numba"], [(1, 600), (40, 90)], kv_heads=4, group=2)
    whole = torch.cat(paged.attend())
    backend = paged.backend
    k, v = paged.planes
    q = torch.cat([x[length - rows :] for x, (rows, length) in zip(paged.q, paged.sequences)])
    part = backend.attend(paged.plan(paged.sequences), q[:, 2:6], k[1:3], v[1:3], scale=paged.dim**-0.5)
    assert torch.equal(part, whole[:, 2:6])


def test_strided_rows_and_half_precision_queries() -> None:
    """Transformers hands over transposed views of `[1, heads, rows, dim]`, in the model's type."""
    paged = PagedBatch(BACKENDS["numba"], [(9, 50), (1, 20)])
    q = torch.cat([x[length - rows :] for x, (rows, length) in zip(paged.q, paged.sequences)])
    view = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not view.is_contiguous()
    step, scale = paged.plan(paged.sequences), paged.dim**-0.5
    wanted = torch.cat(paged.attend())
    assert torch.equal(paged.backend.attend(step, view, *paged.planes, scale=scale), wanted)
    half = paged.backend.attend(step, view.bfloat16(), *paged.planes, scale=scale)
    full = paged.backend.attend(step, view.bfloat16().float(), *paged.planes, scale=scale)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, full.bfloat16())


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12)])
@pytest.mark.parametrize("name", ["numba", "torch"])
def test_16_bit_kv(name: str, kv_dtype: str, bound: float) -> None:
    """The error is that of rounding K and V once: against exact attention over the rounded KV there is none left."""
    paged = PagedBatch(BACKENDS[name], [(1, 700), (70, 300), (1, 3)], dim=64, kv_dtype=kv_dtype)
    exact = paged.dense()
    if name == "torch":
        for planes in paged.planes:
            torch.nan_to_num_(planes)
    found = paged.attend()
    # |K| and |V| reach 5; scores move by |q| |k| bound / 8 at most, far less in the mean.
    assert worst(found, exact) < 8 * bound
    for x in (paged.k, paged.v):
        x[:] = [one.to(getattr(torch, kv_dtype)).float() for one in x]
    assert worst(found, paged.dense()) < TOLERANCE


def test_unknown_choices_are_told() -> None:
    with pytest.raises(ConfigError, match="device 'tpu'"):
        backend_for("tpu")
    with pytest.raises(ConfigError, match="'flashinfer' does not run on 'cpu'"):
        backend_for("cpu", name="flashinfer")
    with pytest.raises(ConfigError, match="page size 24"):
        BACKENDS["numba"].k_page_shape(24, 64)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="needs a CUDA build"):
            backend_for("cuda")


def test_contradicting_plans_are_refused() -> None:
    paged = PagedBatch(BACKENDS["numba"], [(2, 40)])
    with pytest.raises(ValueError, match="do not fit cached lengths"):
        paged.plan([(3, 2)])
    paged.q[0] = torch.randn(500, 6, 32)
    with pytest.raises(ValueError, match="do not hold 500 tokens"):
        paged.attend([(1, 500)])
    step = paged.plan([(2, 40)])
    with pytest.raises(ValueError, match="does not fit 2 rows"):
        paged.backend.attend(step, torch.zeros(3, 6, 32), *paged.planes, scale=1.0)


def test_a_step_without_rows() -> None:
    paged = PagedBatch(BACKENDS["numba"], [(0, 12)])
    assert [tuple(out.shape) for out in paged.attend()] == [(0, 6, 32)]


def protocol(backend: AttentionBackend) -> AttentionBackend:
    """Holds for the type checker and at run time."""
    return backend


def test_backends_follow_the_interface() -> None:
    for backend in BACKENDS.values():
        assert isinstance(protocol(backend), AttentionBackend)
        k, v = empty_planes(backend, 2, 3, 16, 24, "float32")
        assert k.shape[:2] == v.shape[:2] == (2, 3)
