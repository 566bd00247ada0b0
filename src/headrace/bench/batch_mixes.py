"""Offline jobs to compare orders with: long shared prefixes with short answers, short prompts with long answers.

Token ids are random, all from a fixed seed. A planner may know the limit that users set, not what a request will
produce: the limit is the same for all requests of a kind, the true length is drawn for each.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.bench.workload import Item, items
from headrace.core.errors import ConfigError
from headrace.offline.planning.requests import JobRequests


@dataclass(frozen=True)
class Mix:
    """How a job is made; lengths are in tokens, ranges are inclusive.

    Attributes:
        prefixes: different shared prefixes.
        per_prefix: requests of each.
        prefix: length of each, a range.
        question: length of what follows it, a range.
        answer: output of these, a range.
        chats: requests that share nothing.
        chat: their prompts' length, a range.
        reply: their outputs, a range.
    """

    prefixes: int
    per_prefix: int
    prefix: tuple[int, int]
    question: tuple[int, int]
    answer: tuple[int, int]
    chats: int
    chat: tuple[int, int]
    reply: tuple[int, int]


#: Prefix-heavy, even and reply-heavy jobs: 400 requests each, the prefixes together larger than a pool of 8,064 tokens.
MIXES = {
    "prefixes": Mix(42, 8, (180, 240), (10, 20), (1, 6), 64, (20, 40), (32, 60)),
    "even": Mix(40, 6, (180, 240), (10, 20), (1, 6), 160, (20, 40), (20, 42)),
    "replies": Mix(48, 4, (180, 230), (10, 20), (1, 6), 208, (20, 40), (14, 38)),
}


@dataclass(frozen=True)
class Job:
    """A job, shuffled.

    Attributes:
        items: what an engine is given: every request with its true output length.
        requests: what a planner is given: limits only.
    """

    items: Sequence[Item]
    requests: JobRequests

    @property
    def lengths(self) -> list[int]:
        """True output lengths."""
        return [item.max_tokens for item in self.items]


def make_job(mix: str, seed: int = 0, vocab_size: int = 40000) -> Job:
    """The job of a mix.

    Args:
        mix: one of `MIXES`.
        seed: of lengths, tokens and the order.
        vocab_size: token ids are below this.

    Raises:
        ConfigError: there is no such mix.
    """
    if mix not in MIXES:
        raise ConfigError(f"--mix: {mix!r} is not one of {', '.join(MIXES)}")
    how, stream = MIXES[mix], random.Random(seed)

    def tokens(count: tuple[int, int]) -> list[int]:
        return [stream.randrange(min(100, vocab_size // 2), vocab_size) for _ in range(stream.randint(*count))]

    made: list[tuple[list[int], int, int]] = []
    for _ in range(how.prefixes):
        prefix = tokens(how.prefix)
        made += [(prefix + tokens(how.question), stream.randint(*how.answer), 0) for _ in range(how.per_prefix)]
    made += [(tokens(how.chat), stream.randint(*how.reply), 1) for _ in range(how.chats)]
    stream.shuffle(made)
    limits = (2 * how.answer[1], 2 * how.reply[1])
    return Job(
        items((prompt, length) for prompt, length, _ in made),
        JobRequests.of([prompt for prompt, _, _ in made], [limits[k] for _, _, k in made], [k for _, _, k in made]),
    )


def several(jobs: Sequence[Job]) -> Job:
    """One job out of some, one behind the other."""
    made = [item for job in jobs for item in job.items]
    parts = [job.requests for job in jobs]
    offsets = np.zeros(len(made) + 1, np.int64)
    np.cumsum(np.concatenate([part.prompt_lengths for part in parts]), out=offsets[1:])
    return Job(
        items((item.prompt, item.max_tokens) for item in made),
        JobRequests(
            np.concatenate([part.tokens for part in parts]),
            offsets,
            np.concatenate([part.max_tokens for part in parts]),
            np.concatenate([part.groups for part in parts]),
        ),
    )
