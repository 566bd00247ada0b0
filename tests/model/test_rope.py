"""Rotary frequencies do not depend on who else is in the step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_step import DenseCache, DenseStep
from families import reference_logits, save
from torch import Tensor

from headrace.model.decoder import Decoder
from headrace.model.loader import load

_DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


def _last(decoder: Decoder, tokens: list[int], neighbour: int = 0) -> Tensor:
    """Log-probabilities after `tokens`, with a neighbour of that many tokens in the same step."""
    rows = torch.tensor(tokens + [5] * neighbour)
    positions = torch.cat([torch.arange(len(tokens)), torch.arange(neighbour)])
    step = DenseStep(DenseCache(), [(0, len(tokens))] + ([(1, neighbour)] if neighbour else []))
    fwd = decoder.begin(rows, positions, step)
    decoder.run(fwd, 0, decoder.shape.num_layers)
    return decoder.logits(fwd, torch.tensor([len(tokens) - 1]))[0].log_softmax(-1)


@pytest.mark.parametrize(("family", "changes"), [("phi3-longrope", {}), ("llama", _DYNAMIC)])
def test_a_long_neighbour_changes_nothing(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    decoder = load(save(family, tmp_path, **changes), threads=1)
    short = list(range(3, 20))
    alone = _last(decoder, short)
    torch.testing.assert_close(_last(decoder, short, neighbour=decoder.shape.max_position), alone, atol=2e-4, rtol=0)
    # And not afterwards either: nothing stays behind from a long step.
    assert torch.equal(_last(decoder, short), alone)


def test_longrope_follows_max_model_len(tmp_path: Path) -> None:
    """Up to the original length the short factors, above it the long ones: as Transformers for a row that long."""
    folder = save("phi3-longrope", tmp_path)
    tokens = torch.randint(3, 211, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    short, long = reference_logits(folder, [tokens[:100], tokens])
    torch.testing.assert_close(
        _last(load(folder, threads=1, max_model_len=128), tokens[:100]), short[-1].log_softmax(-1), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(
        _last(load(folder, threads=1, max_model_len=512), tokens), long[-1].log_softmax(-1), atol=1e-3, rtol=0
    )


def test_dynamic_follows_max_model_len(tmp_path: Path) -> None:
    """The base that Transformers computes for a row of exactly `max_model_len` tokens."""
    folder = save("llama", tmp_path, **_DYNAMIC)
    tokens = torch.randint(3, 211, (150,), generator=torch.Generator().manual_seed(2)).tolist()
    wanted = reference_logits(folder, [tokens])[0][-1].log_softmax(-1)
    torch.testing.assert_close(_last(load(folder, threads=1, max_model_len=150), tokens), wanted, atol=1e-3, rtol=0)
    assert load(folder, threads=1).shape.max_position == 256
