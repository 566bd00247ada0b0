"""Prompts to compare outputs on: pseudo-text of many lengths, chosen to fall on and beside page and chunk edges."""

import random
from collections.abc import Sequence
from typing import Any

from headrace.bench.workload import Item, items

#: 32 lengths from 1 to 3,000 tokens.
LENGTHS = (
    1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 400, 500, 511, 512,
    513, 700, 1000, 1500, 2000, 3000,
)  # fmt: skip
SHORT_LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 150, 190)

_SENTENCES = (
    "The water comes down the headrace and turns the wheel before it joins the river again.",
    "She measured the channel twice, wrote the numbers in her notebook, and said nothing.",
    "Every request waits in a queue until the machine has room for one more.",
    "In 1878 the mill was sold for 4,200 crowns to a family from the valley.",
    "How long does a step take when thirty-two users read at the same time?",
    "A cache may lose what it holds, but it must never lie about it.",
    "Press the cheese for twelve hours, turn it, salt it, and keep it at 10 degrees.",
    "def area(radius): return 3.14159 * radius ** 2",
    "He asked whether the train to Lyon still stops at the small station by the lake.",
    "The committee found three faults: a missing bolt, a worn bearing, and an optimistic report.",
    '{"name": "Ada", "languages": ["English", "French"], "born": 1815}',
    "Nobody had expected the rain to last; the fields were lakes by the end of the week.",
    "First sort the prompts, then compare each one with its neighbour.",
    "Die Mühle steht am Bach, und das Rad dreht sich seit dem Morgen.",
    "Light travels about thirty centimetres in a nanosecond, which is why the cables are short.",
    "Once the tide had gone out, the children ran to see what the sea had left behind.",
)


def pseudo_text(words: int, seed: int) -> str:
    """At least `words` words of sentences in a seeded order; the same seed gives the same text."""
    order = random.Random(seed)
    parts: list[str] = []
    count = 0
    while count < words:
        parts.append(order.choice(_SENTENCES))
        count += parts[-1].count(" ") + 1
    return " ".join(parts)


def text_prompts(tokenizer: Any, lengths: Sequence[int], outputs: int) -> list[Item]:
    """A prompt of each length, cut from tokenised pseudo-text, greedy with `outputs` tokens."""
    prompts = []
    for seed, length in enumerate(lengths):
        tokens = tokenizer.encode(pseudo_text(length + 8, seed))
        while len(tokens) < length:  # a tokeniser that needs less than one token a word
            tokens = tokens + tokens
        prompts.append(tokens[:length])
    return items((prompt, outputs) for prompt in prompts)


def random_prompts(vocabulary: int, lengths: Sequence[int], outputs: int, seed: int = 0) -> list[Item]:
    """The same with random token ids from 3 on (below are a tiny model's special tokens)."""
    stream = random.Random(seed)
    return items(([stream.randrange(3, vocabulary) for _ in range(length)], outputs) for length in lengths)


def with_shared_prefixes(batch: Sequence[Item], page_size: int) -> list[Item]:
    """Prompts that begin as those of the batch do and then differ, cut on, before and after page edges."""
    shared: list[Item] = []
    for number, item in enumerate(batch):
        length = len(item.prompt)
        pages = max(1, length // (2 * page_size))
        cut = min(length, pages * page_size + (number % 3) - 1)
        if cut < 1:
            continue
        tail = batch[(number + 1) % len(batch)].prompt[:7]
        shared.append(Item(f"{item.custom_id}-shared", [*item.prompt[:cut], *tail], item.params))
    return shared
