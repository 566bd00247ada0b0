"""Fused parts stand only where they give the original's numbers."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from families import save
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headrace.model.fuse import fuse_norm
from headrace.model.fused import FusedLayer, RowNorm
from headrace.model.linears import PackedLinear, pack_linears
from headrace.model.loader import load
from headrace.model.release import Weights


def _kinds(folder: Path) -> Counter[str]:
    decoder = load(folder, threads=1)
    return Counter(type(part).__name__ for layer in decoder.layers for part in layer.modules())


@pytest.mark.parametrize("family", ["llama3-rope", "smollm-tied", "mistral-window", "qwen2", "qwen3", "phi3-partial"])
def test_plain_layers_are_fused_whole(family: str, tmp_path: Path) -> None:
    kinds = _kinds(save(family, tmp_path))
    assert kinds["FusedLayer"] == 4
    assert kinds["PackedLinear"] + kinds["GatedLinear"] == 16
    assert kinds["GatedLinear"] == (0 if family == "llama3-rope" else 4)  # its MLP has biases
    assert kinds["Linear"] == 0


def test_other_layers_keep_their_own_way(tmp_path: Path) -> None:
    gemma = _kinds(save("gemma2", tmp_path / "gemma"))  # a norm after attention and MLP too
    assert (gemma["FusedLayer"], gemma["FusedAttention"], gemma["GatedMlp"], gemma["RowNorm"]) == (0, 4, 4, 16)
    cohere = _kinds(save("cohere", tmp_path / "cohere"))  # interleaved rotary embedding
    assert (cohere["FusedAttention"], cohere["CohereAttention"]) == (0, 4)
    nope = _kinds(save("smollm3", tmp_path / "smollm3"))  # every fourth layer without rotary embedding
    assert (nope["FusedLayer"], nope["SmolLM3Attention"]) == (3, 1)
    granite = _kinds(save("granite", tmp_path / "granite"))  # a factor on the residual
    assert (granite["FusedLayer"], granite["FusedAttention"]) == (0, 4)


class _TiltedRMSNorm(LlamaRMSNorm):
    """Looks like the usual norm, computes something a little different."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.001


class _Owner(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


@torch.inference_mode()
def test_a_norm_that_only_looks_right_stays() -> None:
    rows = torch.randn(1, 5, 32)
    for kind, replaced in ((LlamaRMSNorm, True), (_TiltedRMSNorm, False)):
        owner = _Owner(kind(32, eps=1e-5))
        fuse_norm(owner, rows)
        assert isinstance(owner.norm, RowNorm) is replaced


@torch.inference_mode()
def test_a_wrong_epsilon_shows() -> None:
    norm = LlamaRMSNorm(32, eps=1e-5)
    norm.variance_epsilon = 1e-5
    forward = norm.forward

    def lies(x: torch.Tensor) -> torch.Tensor:
        norm.variance_epsilon = 1e-6
        out = forward(x)
        norm.variance_epsilon = 1e-5
        return out

    norm.forward = lies  # type: ignore[method-assign]
    owner = _Owner(norm)
    fuse_norm(owner, torch.randn(1, 5, 32))
    assert owner.norm is norm


@torch.inference_mode()
def test_shared_weights_outlive_their_packing() -> None:
    one, two = nn.Linear(512, 512), nn.Linear(512, 512)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    x = torch.randn(3, 512)
    wanted = model(x)
    pack_linears(model, Weights(model))
    assert all(isinstance(part, PackedLinear) for part in model)
    torch.testing.assert_close(model(x), wanted)


@torch.inference_mode()
def test_rows_do_not_depend_on_their_number(tmp_path: Path) -> None:
    """A layer on 1, 3 and 70 rows gives each row the same numbers, and never writes into its input."""
    from dense_step import DenseCache, DenseStep

    decoder = load(save("llama", tmp_path), threads=1)
    layer = decoder.layers[0]
    assert isinstance(layer, FusedLayer)
    hidden, positions = torch.randn(70, 64), torch.arange(70)
    before = hidden.clone()
    whole = decoder.begin_span(hidden, positions, DenseStep(DenseCache(), [(i, 1) for i in range(70)]))
    decoder.run(whole, 0, 4)
    assert torch.equal(hidden, before)
    for part in (slice(0, 1), slice(10, 13)):
        count = part.stop - part.start
        few = decoder.begin_span(hidden[part], positions[part], DenseStep(DenseCache(), [(i, 1) for i in range(count)]))
        decoder.run(few, 0, 4)
        torch.testing.assert_close(few.hidden, whole.hidden[part], rtol=1e-4, atol=1e-4)
