"""The sampler: parameters against references, independence of rows, errors of single rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_world import EOS, VOCAB, row
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from headrace.core.errors import InvalidRequest, ModelError
from headrace.core.sampling import GrammarSpec, SamplingParams
from headrace.engine.sampling import Sampler

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def sampler():
    return Sampler(VOCAB, [EOS], None, 2)


def logits_of(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_batch_is_argmax(sampler):
    logits = logits_of(20)
    expected = torch.argmax(logits, -1)
    result = sampler.sample(logits.clone(), [row(GREEDY, sampler.open(GREEDY, [1])) for _ in range(20)])
    assert result.tokens.dtype == np.int32
    assert result.tokens.tolist() == expected.tolist()
    assert list(result.logprobs) == [None] * 20
    assert result.errors == {}


def mixed_params():
    return [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=1.3, top_k=30, logprobs=3),
        SamplingParams(min_p=0.05, repetition_penalty=1.3),
        SamplingParams(frequency_penalty=1.0, presence_penalty=-0.5, logprobs=0),
        SamplingParams(logit_bias={7: 50.0, 8: 49.0}),
        SamplingParams(min_tokens=10, stop_token_ids=(3, 4)),
        SamplingParams(),
    ]


def test_a_row_does_not_depend_on_its_batch(sampler):
    params = mixed_params() * 3
    outputs = [list(np.random.default_rng(i).integers(0, VOCAB, i)) for i in range(len(params))]
    logits = logits_of(len(params), 4)

    def rows():
        return [
            row(p, sampler.open(p, [1, 2]), seed=i, position=2 + len(outputs[i]), prompt=(1, 2), output=outputs[i])
            for i, p in enumerate(params)
        ]

    together = sampler.sample(logits.clone(), rows())
    backwards = sampler.sample(logits.flip(0).clone(), rows()[::-1])
    assert together.tokens.tolist() == backwards.tokens.tolist()[::-1]
    serial = Sampler(VOCAB, [EOS], None, 1)
    for i, one in enumerate(rows()):
        alone = serial.sample(logits[i : i + 1].clone(), [one])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_seed_and_position_make_the_token(sampler):
    params = SamplingParams()
    state = sampler.open(params, [1])
    logits = torch.zeros(1, VOCAB)

    def token(seed, position):
        return int(sampler.sample(logits.clone(), [row(params, state, seed=seed, position=position)]).tokens[0])

    assert token(-5, 3) == token(-5, 3)
    assert len({token(seed, 3) for seed in range(-20, 20)}) > 30
    assert len({token(7, position) for position in range(40)}) > 30


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    output=st.lists(st.integers(0, 20), max_size=150),
    cut=st.integers(0, 150),
    repetition=st.sampled_from([1.0, 1.5, 0.7]),
    frequency=st.sampled_from([0.0, 0.75, -2.0]),
    presence=st.sampled_from([0.0, 1.25]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
)
def test_penalties_and_bias(sampler, prompt, output, cut, repetition, frequency, presence, bias):
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias or None
    )
    state = sampler.open(params, prompt)
    # the state has seen a longer output that was cut back, and grows again
    state.resume([*output, 9, 400, 9])
    state.resume(output[:cut])
    logits = logits_of(1, len(output))
    expected = logits.double().clone()
    for token, value in bias.items():
        expected[0, token] += np.float32(value)
    ids = torch.tensor([prompt + output])
    if repetition != 1:
        expected = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(repetition)])(ids, expected)
    for token in set(output):
        expected[0, token] -= frequency * output.count(token) + presence
    sampler.sample(logits, [row(params, state, prompt=prompt, output=output)])
    assert torch.allclose(logits.double(), expected, atol=1e-4)


@pytest.mark.parametrize(("ignore_eos", "forbidden"), [(False, {EOS, 3, 4}), (True, {3, 4})])
def test_min_tokens_forbids_the_ends(sampler, ignore_eos, forbidden):
    params = SamplingParams(min_tokens=2, stop_token_ids=(3, 4), ignore_eos=ignore_eos)
    state = sampler.open(params, [1])
    for output, ruled_out in (([], forbidden), ([9], forbidden), ([9, 9], set())):
        logits = logits_of(1)
        sampler.sample(logits, [row(params, state, output=output)])
        assert set(torch.isneginf(logits[0]).nonzero().flatten().tolist()) == ruled_out


def test_logprobs_are_of_the_raw_distribution(sampler):
    params = [
        SamplingParams(temperature=0, logprobs=3, logit_bias={5: 100.0}),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0.1, top_k=2, logprobs=20, repetition_penalty=5.0),
        SamplingParams(temperature=0),
    ]
    logits = logits_of(4, 8)
    exact = torch.log_softmax(logits.double(), -1)
    result = sampler.sample(logits, [row(p, sampler.open(p, [1, 2])) for p in params])
    assert result.tokens[0] == 5
    assert result.logprobs[3] is None
    for r, top in ((0, 3), (1, 0), (2, 20)):
        entry = result.logprobs[r]
        assert entry.token == result.tokens[r]
        assert entry.logprob == pytest.approx(float(exact[r, entry.token]), abs=1e-5)
        assert entry.rank == 1 + int((exact[r] > exact[r, entry.token]).sum())
        best = torch.topk(exact[r], top)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_prompt_logprobs(sampler):
    logits = logits_of(50, 9)
    following = torch.randint(VOCAB, (50,), generator=torch.Generator().manual_seed(1))
    entries = sampler.prompt_logprobs(logits, following.numpy().astype(np.int32), 2)
    exact = torch.log_softmax(logits.double(), -1)
    assert [e.token for e in entries] == following.tolist()
    assert [e.logprob for e in entries] == pytest.approx(exact[torch.arange(50), following].tolist(), abs=1e-5)
    assert all(len(e.top) == 2 for e in entries)
    assert [e.top[0][0] for e in entries] == exact.argmax(-1).tolist()
    logits[13, 5] = torch.nan
    with pytest.raises(ModelError, match="row 13"):
        sampler.prompt_logprobs(logits, following.numpy().astype(np.int32), 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_unusable_row_ends_alone(sampler, value):
    params = [GREEDY, SamplingParams(logprobs=2), SamplingParams(top_p=0.5)]
    for bad in range(3):
        logits = logits_of(3)
        expected = sampler.sample(logits.clone(), [row(p, sampler.open(p, [1])) for p in params]).tokens
        logits[bad] = value
        result = sampler.sample(logits, [row(p, sampler.open(p, [1]), position=77) for p in params])
        assert list(result.errors) == [bad]
        assert "position 77" in result.errors[bad]
        assert result.tokens[bad] == -1
        assert result.logprobs[bad] is None
        if bad != 0:
            assert result.tokens[0] == expected[0]


def test_shapes_are_checked(sampler):
    with pytest.raises(ValueError, match="expected logits"):
        sampler.sample(torch.zeros(1, VOCAB + 1), [row(GREEDY, sampler.open(GREEDY, [1]))])


def test_other_layouts_and_types_of_logits(sampler):
    logits = logits_of(4)
    rows = [row(GREEDY, sampler.open(GREEDY, [1])) for _ in range(2)]
    expected = logits[::2].argmax(-1).tolist()
    assert sampler.sample(logits[::2], rows).tokens.tolist() == expected
    assert sampler.sample(logits[::2].t().contiguous().t(), rows).tokens.tolist() == expected
    half = logits[::2].bfloat16()
    assert sampler.sample(half, rows).tokens.tolist() == half.float().argmax(-1).tolist()


def test_an_empty_batch(sampler):
    result = sampler.sample(torch.zeros(0, VOCAB), [])
    assert len(result.tokens) == 0


def test_structured_output_without_a_tokenizer_is_refused(sampler):
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        sampler.open(SamplingParams(grammar=GrammarSpec("json_object")), [1])
