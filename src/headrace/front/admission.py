"""What a prompt and its parameters must satisfy before an engine sees them, and how they become engine requests."""

import random
import time
from collections.abc import Sequence

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.core.events import EngineInfo
from headrace.core.request import OFFLINE_SHARE, Request, ServiceClass
from headrace.core.sampling import GrammarSpec, SamplingParams
from headrace.front.assembly import PromptContext, SequenceText
from headrace.front.stop import StopSet
from headrace.front.tokenizer import Tokenizer, too_long

MAX_STOP_LENGTH = 4096
"""Longest stop string, in characters."""

_SEED_LIMIT = 1 << 62


class Admission:
    """The door in front of an engine.

    Args:
        info: of the engine.
        tokenizer: of its model.
        seed: of the seeds drawn for requests without one; 0: from the system.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, seed: int = 0) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._random: random.Random = random.Random(seed) if seed else random.SystemRandom()

    def check(self, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
        """The parameters with `max_tokens` and `seed` filled in; for a grammar see `check_grammar`.

        Raises:
            InvalidRequest: something is out of range; `context_length_exceeded` where the context is too short.
        """
        params.check(self.info.vocab_size)
        if any(len(stop) > MAX_STOP_LENGTH for stop in params.stop):
            raise InvalidRequest(f"stop strings may have at most {MAX_STOP_LENGTH} characters", "stop")
        if not prompt:
            raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
        limit = self.info.max_model_len
        if len(prompt) >= limit or len(prompt) + (params.max_tokens or 1) > limit:
            raise too_long(limit, len(prompt), params.max_tokens or 1)
        self._check_ids(prompt)
        left = limit - len(prompt)
        if params.min_tokens > left:
            raise InvalidRequest(
                f"min_tokens ({params.min_tokens}) exceeds the {left} tokens that the context has left", "min_tokens"
            )
        seed = self._random.randrange(_SEED_LIMIT) if params.seed is None else params.seed
        return msgspec.structs.replace(params, max_tokens=params.max_tokens or left, seed=seed)

    def check_grammar(self, grammar: GrammarSpec) -> None:
        """Refuse a grammar that cannot be used; takes up to some tenths of a second.

        Raises:
            InvalidRequest: what is wrong with it.
        """
        from headrace.engine.sampling import check_grammar  # llguidance, which most servers never need

        folder = self.tokenizer.folder
        check_grammar(grammar, None if folder is None else str(folder))

    def split(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        service: ServiceClass,
        priority: int,
        cache_salt: str,
        share: float = OFFLINE_SHARE,
    ) -> list[tuple[Request, SequenceText]]:
        """One engine request and one text per sequence; `params` comes from `check`."""
        stops = StopSet(params.stop) if params.stop else None
        context = PromptContext(self.tokenizer, params, len(prompt), frozenset(self.info.eos_token_ids), stops)
        arrival = time.time()
        children = []
        for i in range(params.n):
            request = Request(
                id=f"{request_id}-{i}",
                prompt=prompt,
                params=msgspec.structs.replace(params, n=1, seed=_child_seed(params.seed, i)),
                service=service,
                priority=priority,
                cache_salt=cache_salt,
                arrival=arrival,
                share=share,
            )
            children.append((request, SequenceText(context, i)))
        return children

    def _check_ids(self, prompt: Sequence[int]) -> None:
        size = self.info.vocab_size
        if min(prompt) < 0 or max(prompt) >= size:
            wrong = next(token for token in prompt if not 0 <= token < size)
            raise InvalidRequest(f"token {wrong} is not in the vocabulary of {size} tokens", "prompt")


def _child_seed(seed: int | None, index: int) -> int:
    """The seed of the i-th sequence: the next ones, wrapped into 64 signed bits."""
    return ((seed or 0) + index + (1 << 63)) % (1 << 64) - (1 << 63)
