"""What the tests of the sampler share: a small tokenizer and a loop that generates from random logits."""

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.core.sampling import SamplingParams
from headrace.engine.sampling import Sampler, SampleRow

EOS = 0
VOCAB = 512

_TEXT = [
    '{"name": "Ada", "age": 36, "tags": ["x", "y"], "ok": true, "none": null}',
    "the wheel turns and the water runs, yes and no: 1234567890 times; état, 水車",
]


def save_tokenizer(folder):
    """A byte-level BPE of fewer than VOCAB tokens, token 0 its end of sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.save_pretrained(folder)
    return fast


def row(params, state, *, seed=1, position=1, prompt=(1,), output=()):
    return SampleRow(params, seed, position, np.asarray(prompt, np.int32), np.asarray(output, np.int32), state)


def generate(sampler: Sampler, params: SamplingParams, *, seed=1, limit=200, output=(), state=None):
    """Tokens of one sequence over random logits that depend on the position alone, until EOS; and the state."""
    state = sampler.open(params, [1]) if state is None else state
    output = list(output)
    while len(output) < limit and EOS not in output:
        generator = torch.Generator().manual_seed(seed * 1000 + len(output))
        logits = torch.randn(1, VOCAB, generator=generator) * 3
        result = sampler.sample(logits, [row(params, state, seed=seed, position=1 + len(output), output=output)])
        assert not result.errors, result.errors
        output.append(int(result.tokens[0]))
    return output, state
