"""Every family against plain Transformers, by the log-probabilities of all positions."""

from pathlib import Path

import pytest
import torch
from dense_step import DenseCache, DenseStep
from families import FAMILIES, reference_logits, save
from torch import Tensor

from headrace.model.decoder import Decoder
from headrace.model.loader import load

_LENGTHS = (41, 1, 23, 60)


def _sequences(vocabulary: int = 211) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in _LENGTHS]


def _assert_same(ours: Tensor, reference: Tensor) -> None:
    """Log-probabilities within 1e-3 of the standard deviation of the logits (DESIGN 3, parity)."""
    assert ours.dtype == torch.float32
    difference = (ours.log_softmax(-1) - reference.log_softmax(-1)).abs().max()
    assert difference <= 1e-3 * reference.std(), f"log-probabilities differ by {difference}"


def _whole(decoder: Decoder, tokens: list[int]) -> Tensor:
    step = DenseStep(DenseCache(), [(0, len(tokens))])
    fwd = decoder.begin(torch.tensor(tokens), torch.arange(len(tokens)), step)
    decoder.run(fwd, 0, decoder.shape.num_layers)
    return decoder.logits(fwd, torch.arange(len(tokens)))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, list[Tensor]]:
    folder = save(request.param, tmp_path_factory.mktemp(request.param))
    # Longrope: up to 128 tokens the short factors hold, as in the reference's rows.
    longest = 128 if "longrope" in request.param else 0
    return load(folder, threads=1, max_model_len=longest), reference_logits(folder, _sequences())


def test_alone(family: tuple[Decoder, list[Tensor]]) -> None:
    decoder, references = family
    for tokens, reference in zip(_sequences(), references, strict=True):
        _assert_same(_whole(decoder, tokens), reference)


def test_packed_chunked_and_interleaved(family: tuple[Decoder, list[Tensor]]) -> None:
    """Odd chunks of all sequences packed together, two forwards in flight, layers in uneven segments."""
    decoder, references = family
    sequences, cache, layers = _sequences(), DenseCache(), decoder.shape.num_layers
    chunks: dict[int, list[Tensor]] = {index: [] for index in range(len(sequences))}
    done = [0] * len(sequences)
    pairs = [(0, 1), (2, 3)]
    while any(done[i] < len(sequences[i]) for i in range(len(sequences))):
        flying = []
        for pair, size in zip(pairs, (7, 11), strict=True):
            rows = [(i, min(size - 3 * (i % 2), len(sequences[i]) - done[i])) for i in pair]
            rows = [(i, n) for i, n in rows if n > 0]
            if not rows:
                continue
            tokens = [t for i, n in rows for t in sequences[i][done[i] : done[i] + n]]
            positions = [p for i, n in rows for p in range(done[i], done[i] + n)]
            step = DenseStep(cache, rows)
            flying.append((rows, decoder.begin(torch.tensor(tokens), torch.tensor(positions), step)))
        for _, fwd in flying:
            decoder.run(fwd, 0, 1)
        for _, fwd in reversed(flying):
            decoder.run(fwd, 1, layers - 1)
        for _, fwd in flying:
            decoder.run(fwd, layers - 1, layers)
        for rows, fwd in flying:
            logits, at = decoder.logits(fwd, torch.arange(sum(n for _, n in rows))), 0
            for i, n in rows:
                chunks[i].append(logits[at : at + n])
                at, done[i] = at + n, done[i] + n
    for index, reference in enumerate(references):
        _assert_same(torch.cat(chunks[index]), reference)


def test_span_from_hidden_states(family: tuple[Decoder, list[Tensor]]) -> None:
    """A guest that gets hidden states and positions alone goes on exactly as the home would."""
    decoder, references = family
    tokens, layers = torch.tensor(_sequences()[2]), decoder.shape.num_layers
    positions, cache = torch.arange(len(tokens)), DenseCache()
    home = decoder.begin(tokens, positions, DenseStep(cache, [(0, len(tokens))]))
    decoder.run(home, 0, 2)
    guest = decoder.begin_span(home.hidden.clone(), positions, DenseStep(cache, [(0, len(tokens))]), layer=2)
    decoder.run(guest, 2, layers)
    home.hidden, home.layer = guest.hidden, layers
    _assert_same(decoder.logits(home, torch.arange(len(tokens))), references[2])


def test_rows_of_logits(family: tuple[Decoder, list[Tensor]]) -> None:
    decoder, references = family
    tokens = _sequences()[0]
    fwd = decoder.begin(torch.tensor(tokens), torch.arange(len(tokens)), DenseStep(DenseCache(), [(0, len(tokens))]))
    with pytest.raises(ValueError, match="before layer 0"):
        decoder.logits(fwd, torch.tensor([0]))
    with pytest.raises(ValueError, match="before layer 0"):
        decoder.run(fwd, 1, 2)
    decoder.run(fwd, 0, decoder.shape.num_layers)
    _assert_same(decoder.logits(fwd, torch.tensor([40, 3])), references[0][[40, 3]])


def test_shape(family: tuple[Decoder, list[Tensor]]) -> None:
    decoder, references = family
    shape = decoder.shape
    assert (shape.num_layers, shape.heads, shape.hidden, shape.dtype) == (4, 4, 64, "float32")
    assert shape.vocab_size == references[0].shape[1]
    assert len(shape.windows) == len(shape.softcaps) == 4
    assert 0 < shape.linear_params < shape.params
    assert shape.eos_ids == (2,)


def test_window_and_softcap_arrive(tmp_path: Path) -> None:
    gemma = load(save("gemma2", tmp_path / "gemma"), threads=1).shape
    assert gemma.windows == (8, None, 8, None)
    assert gemma.softcaps == (50.0,) * 4
    assert load(save("mistral-window", tmp_path / "mistral"), threads=1).shape.windows == (9,) * 4
