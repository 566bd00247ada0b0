"""Output lengths that nobody knows yet: a sample is run first, the rest is thought like its relatives.

A request's relatives are, from near to far: its node of the prefix tree, the top subtree over it, requests of its group
with prompts of about its length, its group. Each level's estimate is the mean of the lengths seen there, drawn
towards the next farther level by `_PULL` imaginary observations of that level's estimate, so that a single sample of a
subtree counts without being believed alone. `max_tokens` bounds every estimate.
"""

import numpy as np

from headrace.offline.planning.requests import JobRequests
from headrace.offline.planning.tree import Floats, Ints, PrefixTree

#: Share of the requests that run first.
SAMPLE = 0.01
#: Where nothing is known, a request is thought to produce this share of its max_tokens (own).
PRIOR_SHARE = 0.5
#: A running request that has outlived its estimate is thought to end after so many times what it has produced (own).
OUTLIVED = 1.25
_PULL = 1.0
#: A subtree is a stratum of its own from so many requests on; smaller ones are sampled by group and prompt length.
SMALL = 50
_FEW = 3


class LengthEstimator:
    """Estimates every request's output length from those seen so far.

    Args:
        requests: of the job.
        tree: of its prompts.
        lengths: what is known beforehand, by request; None: nothing.
    """

    def __init__(self, requests: JobRequests, tree: PrefixTree, lengths: Ints | None = None) -> None:
        count = len(requests)
        self._limits = requests.max_tokens.astype(np.float64)
        self._known = None if lengths is None else np.minimum(lengths, requests.max_tokens).astype(np.float64)
        top, above = np.empty(count, np.int64), np.empty(count, np.int64)
        top[tree.leaves], above[tree.leaves] = tree.top(), tree.above
        size = np.log2(requests.prompt_lengths).astype(np.int64)
        groups = _numbered(requests.groups.astype(np.int64))
        kinds = _numbered(groups * 64 + size)
        # From far to near; leaves right below the root have no subtree: there the level says what their kind does.
        self._levels = [
            groups,
            kinds,
            _numbered(np.where(top >= 0, top + kinds.max(initial=0) + 1, kinds)),
            _numbered(np.where(above > 0, above + kinds.max(initial=0) + 1, kinds)),
        ]
        in_large = np.bincount(np.maximum(top, 0), minlength=1)[np.maximum(top, 0)] >= SMALL
        self._strata = _numbered(np.where((top >= 0) & in_large, top + kinds.max(initial=0) + 1, kinds))
        self._ended = np.zeros(int(groups.max(initial=-1)) + 1, np.int64)  # how many of each group
        self._seen = np.zeros(count)  # length of each finished request, 0: not finished
        self._running = np.zeros(count)  # tokens that running ones have produced

    def sample(self, seed: int, share: float = SAMPLE) -> Ints:
        """Requests to run first: of every stratum its share, at least one while that stays near the share in all."""
        if self._known is not None:
            return np.zeros(0, np.int64)
        count = len(self._strata)
        rng = np.random.default_rng(seed)
        shuffled = rng.permutation(count)
        by_stratum = shuffled[np.argsort(self._strata[shuffled], kind="stable")]
        sizes = np.bincount(self._strata)
        begins = np.cumsum(sizes) - sizes
        rank = np.arange(count) - np.repeat(begins, sizes)
        wanted = np.maximum(1, np.round(sizes * share))
        chosen = by_stratum[rank < np.repeat(wanted, sizes)]
        most = max(1, int(np.ceil(count * share)))
        if len(chosen) > most:  # more strata than samples: the largest ones
            chosen = chosen[np.argsort(-sizes[self._strata[chosen]], kind="stable")][:most]
        return chosen

    def observe(self, request: int, output_tokens: int) -> bool:
        """One has ended; with no token it was refused, which says nothing of its relatives.

        Returns:
            Whether its group's estimate may be a different one now: at the 1st, 2nd, 3rd, 4th, 8th, .. of the group.
        """
        self._running[request] = 0
        if not output_tokens:
            return False
        self._seen[request] = output_tokens
        group = self._levels[0][request]
        self._ended[group] += 1
        ended = int(self._ended[group])
        return ended == _FEW or ended & (ended - 1) == 0

    def progress(self, requests: Ints, output_tokens: Ints) -> None:
        """Running ones have produced so many tokens."""
        self._running[requests] = output_tokens

    def estimate(self) -> Floats:
        """Output tokens of every request: seen, known, or estimated.

        An estimate is at least what the request has produced, and at most its limit.
        """
        if self._known is not None:
            return np.maximum(self._known, 1.0)
        done = self._seen > 0
        # A kind that nothing is known of is thought long: if it is short, that is soon seen.
        value = np.maximum(PRIOR_SHARE * self._limits, 1.0)
        for level in self._levels:
            outlived = (self._running > 0) & (self._running >= value)
            if level is self._levels[0]:  # those that run outlive the ones that ended: they are thought as before
                counts = done | (self._running > 0)
                length = np.where(done, self._seen, np.where(counts, np.maximum(OUTLIVED * self._running, value), 0.0))
            else:
                counts = done | outlived
                length = np.where(done, self._seen, np.where(outlived, OUTLIVED * self._running, 0.0))
            weight = counts.astype(np.float64)
            count = np.bincount(level, weight)[level]
            total = np.bincount(level, length)[level]
            value = (total + _PULL * value) / (count + _PULL)
        value = np.clip(value, 1.0, self._limits)
        ahead = np.where(self._running >= value, OUTLIVED * self._running, value)
        return np.where(done, self._seen, np.minimum(np.maximum(ahead, self._running + 1), self._limits))


def _numbered(labels: Ints) -> Ints:
    """The same classes, numbered from 0."""
    return np.unique(labels, return_inverse=True)[1].astype(np.int64).reshape(-1)
