"""What the probe refuses in the way a layer calls its attention."""

from typing import Any

import pytest
import torch
from torch import nn

from headrace.core.errors import ModelError
from headrace.model.attention import NAME, AttentionCall, Probe, dense_causal, headrace_attention


class SomeAttention(nn.Module):
    """Stands where a model's attention module would."""

    def __init__(self, layer_idx: int = 0, is_causal: bool = True) -> None:
        super().__init__()
        self.layer_idx, self.is_causal = layer_idx, is_causal


def _call(
    step: Probe | None, module: SomeAttention | None = None, value_width: int = 8, **keywords: Any
) -> torch.Tensor:
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, value_width)
    carried = {} if step is None else {NAME: step}
    return headrace_attention(module or SomeAttention(), q, k, v, keywords.pop("mask", None), **carried, **keywords)[0]


def test_a_plain_call_is_noted() -> None:
    probe = Probe()
    out = _call(probe, scaling=0.5, sliding_window=7, softcap=30.0, position_ids=torch.arange(3), use_cache=False)
    assert out.shape == (1, 3, 4, 8)
    assert probe.calls == {0: AttentionCall(4, 2, 8, 0.5, 7, 30.0)}
    _call(probe, SomeAttention(1))
    assert probe.calls[1].scale == 8**-0.5


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "its own attention mask"),
        ({"module": SomeAttention(is_causal=False)}, "both directions"),
        ({"is_causal": False}, "both directions"),
        ({"value_width": 4}, "latent attention"),
    ],
)
def test_refused(keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        _call(Probe(), **keywords)


def test_no_context_and_two_calls_of_one_layer() -> None:
    with pytest.raises(ModelError, match="does not pass forward keywords"):
        _call(None)
    probe = Probe()
    _call(probe)
    with pytest.raises(ModelError, match="attends twice"):
        _call(probe)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_dense_causal_by_hand(window: int | None) -> None:
    """Query heads h use key head h // group; a window of w shows the last w keys, the query's own included."""
    q, k, v = torch.randn(2, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out = dense_causal(q, k, v, 0.3, window, 2.0)
    for row, position in enumerate((3, 4)):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(4):
            scores = torch.stack([q[row, head] @ k[at, head // 2] for at in range(first, position + 1)]) * 0.3
            weights = (2.0 * torch.tanh(scores / 2.0)).softmax(0)
            wanted = sum(
                weight * v[at, head // 2] for weight, at in zip(weights, range(first, position + 1), strict=True)
            )
            torch.testing.assert_close(out[row, head], wanted, rtol=1e-5, atol=1e-5)
