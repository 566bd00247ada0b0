"""A step context that keeps whole K and V per sequence and attends densely: slow, and plainly right."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.model.attention import dense_causal


class DenseCache:
    """K and V of each (sequence, layer) seen so far."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


class DenseStep:
    """One step over `rows`: (sequence, number of its rows) in packed order."""

    def __init__(self, cache: DenseCache, rows: Sequence[tuple[int, int]]) -> None:
        self.cache, self.rows = cache, rows

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        out, at = torch.empty_like(q), 0
        for sequence, count in self.rows:
            part = slice(at, at + count)
            at += count
            old = self.cache.kv.get((sequence, layer))
            keys, values = k[part].clone(), v[part].clone()
            if old is not None:
                keys, values = torch.cat([old[0], keys]), torch.cat([old[1], values])
            self.cache.kv[sequence, layer] = keys, values
            out[part] = dense_causal(q[part], keys, values, scale, window, softcap)
        assert at == q.shape[0]
        return out
