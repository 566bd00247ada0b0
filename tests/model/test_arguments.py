"""The layers' arguments looked up from positions are those of the model's own forward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import save
from torch import Tensor

from headrace.model import arguments
from headrace.model.arguments import ArgumentTables
from headrace.model.attention import Probe
from headrace.model.decoder import Decoder
from headrace.model.loader import load


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Two rotary tables, one for each kind of layer."""
    return load(save("gemma3", tmp_path_factory.mktemp("gemma"), max_position_embeddings=9000), threads=1)


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.allclose(one.float(), two.float(), atol=1e-6)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_equal(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(_equal, one, two))
    return bool(one == two)


def test_tables_grow_with_the_longest_sequence(gemma: Decoder) -> None:
    tables = ArgumentTables(gemma._record_calls, 9000, gemma.device)
    for positions in ([0], [5, 2047, 3], [2048], [8999, 1], [4, 4, 4]):
        at = torch.tensor(positions)
        ours = tables.calls(at)
        assert ours is not None
        assert _equal(ours, gemma._record_calls(at))
        assert (
            not torch.equal(ours[0][1]["position_embeddings"][0], ours[1][1]["position_embeddings"][0]) or at.max() == 0
        )


def test_beyond_the_largest_table_the_model_prepares_the_step(gemma: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_TABLE_BYTES", 1 << 20)
    monkeypatch.setattr(gemma, "_tables", ArgumentTables(gemma._record_calls, 9000, gemma.device))
    long = torch.tensor([8999, 17])
    assert gemma._tables is not None
    assert gemma._tables.calls(long) is None
    assert _equal(gemma.begin(torch.tensor([4, 5]), long, Probe()).calls, gemma._record_calls(long))
    # Short steps go on as before.
    assert gemma._tables.calls(torch.tensor([3])) is not None


def test_learned_positions_take_the_long_way(tmp_path: Path) -> None:
    """OPT adds a learned position to the embedding: its own forward must prepare every step."""
    opt = load(save("opt", tmp_path), threads=1)
    ids = torch.tensor([7, 7])
    fwd = opt.begin(ids, torch.tensor([3, 90]), Probe())
    assert not torch.allclose(fwd.hidden[0], fwd.hidden[1])


def test_arguments_that_are_no_function_of_positions() -> None:
    def strange(positions: Tensor) -> list[arguments.Call]:
        return [((), {"x": torch.full((1, len(positions), 2), float(len(positions)))})]

    with pytest.raises(ValueError, match="not a function of each row's position"):
        ArgumentTables(strange, 100, torch.device("cpu"))
    with pytest.raises(ValueError, match="takes a tensor of shape"):
        ArgumentTables(lambda positions: [((torch.zeros(3),), {})], 100, torch.device("cpu"))
    with pytest.raises(ValueError, match="takes a object"):
        ArgumentTables(lambda positions: [((object(),), {})], 100, torch.device("cpu"))
