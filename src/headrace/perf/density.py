"""Compute density: a request's compute-bound time over its memory-bound time (BlendServe, arXiv 2411.16102).

    Comp = (2 (p+d) P + attention FLOPs) / compute        Mem = KV bytes read over the decode / bandwidth
    rho  = Comp / Mem      of a set that shares prefixes: (1-s) sum Comp / sum Mem, s the share of prompt tokens saved

with p prompt and d output tokens. The paper's `4 p^2 H L` of attention counts the pairs that a causal mask leaves out;
here they are not counted (half of it). KV bytes are the `(p d + d^2/2)` tokens of the paper times the bytes of a
token's K and V, with grouped queries, sliding windows and any dtype as the model has them. Weights are read once a
step: the rate of the linears is that of a step's rows, which in a device's profile includes reading them; a mixture of
experts reads as many experts as a step's tokens are expected to hit.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.perf.model_shape import ModelShape
from headrace.perf.profile import DeviceProfile
from headrace.perf.step_time import linear_seconds

Floats = NDArray[np.float64]

#: Rows of the step whose rate linears are counted at: what continuous batching with chunked prefill reaches.
ROWS = 512


@dataclass(frozen=True)
class CostRates:
    """What a token costs on a device, in seconds; linear in what a request does.

    Attributes:
        linear: one token through the layers, activations included.
        head: one sampled row.
        pair: one query-key pair of prefill attention, over all layers.
        kv: reading one token's K and V over all layers.
        shape: the model.
    """

    linear: float
    head: float
    pair: float
    kv: float
    shape: ModelShape

    @classmethod
    def of(cls, profile: DeviceProfile, shape: ModelShape, rows: int = ROWS) -> "CostRates":
        """Rates of a device when steps have this many rows."""
        return cls(
            linear=linear_seconds(shape, profile, rows) / rows + shape.activation_bytes / profile.copy,
            head=shape.head_flops / profile.gemm_rate(rows),
            pair=4 * shape.query_width * shape.layers / profile.attention,
            kv=shape.kv_bytes_per_token / profile.kv_read,
            shape=shape,
        )

    def compute(self, prompts: ArrayLike, outputs: ArrayLike, saved: ArrayLike = 0) -> Floats:
        """Comp of requests in seconds.

        Args:
            prompts: prompt tokens.
            outputs: output tokens; the last of a sequence goes through no layer, each samples one row.
            saved: prompt tokens whose KV another request leaves behind.
        """
        p, d, s = (np.asarray(value, np.float64) for value in (prompts, outputs, saved))
        pairs = self._pairs(p) - self._pairs(s)
        return (p - s + np.maximum(d - 1, 0)) * self.linear + d * self.head + pairs * self.pair

    def memory(self, prompts: ArrayLike, outputs: ArrayLike) -> Floats:
        """Mem of requests in seconds: each output token reads the KV of all tokens before it."""
        p, d = np.asarray(prompts, np.float64), np.asarray(outputs, np.float64)
        shape = self.shape
        full = p * d + d * d / 2
        if not shape.window_layers:
            return full * self.kv
        short = np.clip(shape.window - p, 0, d)  # tokens whose window reaches back to the beginning
        slid = p * short + short * short / 2 + (d - short) * shape.window
        part = shape.window_layers / shape.layers
        return (full * (1 - part) + slid * part) * self.kv

    def prefix(self, tokens: ArrayLike) -> Floats:
        """Seconds that computing a prefix of so many tokens takes, from nothing."""
        t = np.asarray(tokens, np.float64)
        return t * self.linear + self._pairs(t) * self.pair

    def _pairs(self, tokens: Floats) -> Floats:
        full: Floats = tokens * (tokens + 1) / 2
        shape = self.shape
        if not shape.window_layers:
            return full
        inside: Floats = np.minimum(tokens, shape.window)
        slid = inside * (inside + 1) / 2 + (tokens - inside) * shape.window
        part = shape.window_layers / shape.layers
        return full * (1 - part) + slid * part


def density(compute: ArrayLike, memory: ArrayLike, sharing: float = 0.0) -> float:
    """Density of a set of requests: `(1-s) sum Comp / sum Mem`; infinite where nothing is read."""
    total = float(np.sum(memory))
    return (1 - sharing) * float(np.sum(compute)) / total if total > 0 else np.inf
