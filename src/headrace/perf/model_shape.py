"""The plain numbers of a model that time and memory are computed from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What a decoder costs, per token and in all.

    Attributes:
        layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: width inside the MLP (of one expert times experts per token, for a mixture of experts).
        linear_params: weights that multiply every token (attention and MLP of all layers, active experts only); neither
            embedding nor head.
        head_params: weights of the language-model head, vocabulary times hidden.
        query_width: query heads times head dimension.
        kv_width: KV heads times head dimension.
        weight_itemsize: bytes of one weight and of one activation.
        kv_itemsize: bytes of one stored K or V number.
        window: tokens that a sliding-window layer looks back on; 0: none.
        window_layers: how many layers slide; the others see the whole context.
        experts: experts of a mixture-of-experts layer; 0: the model is dense.
        experts_per_token: how many of them one token goes through.
        expert_params: weights of one expert, over all layers.
    """

    layers: int
    hidden: int
    intermediate: int
    linear_params: int
    head_params: int
    query_width: int
    kv_width: int
    weight_itemsize: int = 4
    kv_itemsize: int = 4
    window: int = 0
    window_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that no model has; a wrong one would only show as a strange schedule."""
        for name in ("layers", "hidden", "intermediate", "linear_params", "head_params", "query_width", "kv_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.window_layers <= self.layers:
            raise ValueError(f"window_layers must be between 0 and {self.layers}, got {self.window_layers}")
        if self.window_layers and self.window < 1:
            raise ValueError(f"{self.window_layers} layers slide, so window must be at least 1, got {self.window}")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token must be between 1 and {self.experts}, got {self.experts_per_token}")
        if self.experts_per_token * self.expert_params > self.linear_params:
            raise ValueError("the active experts have more weights than linear_params, which counts them in")

    @property
    def dense_params(self) -> int:
        """Weights of `linear_params` that every token multiplies with: all but experts."""
        return self.linear_params - self.experts_per_token * self.expert_params

    def distinct_experts(self, rows: int) -> float:
        """Experts of a layer that this many tokens go through, expected if each token chooses at random."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** rows)

    def weight_bytes(self, rows: int) -> float:
        """Bytes of the layers' weights that a step of this many rows reads."""
        return (self.dense_params + self.distinct_experts(rows) * self.expert_params) * self.weight_itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.kv_width * self.kv_itemsize * self.layers

    @property
    def linear_flops(self) -> int:
        """FLOPs of one token in all linears but the head: a multiply and an add per weight."""
        return 2 * self.linear_params

    @property
    def head_flops(self) -> int:
        """FLOPs of the head for one sampled row."""
        return 2 * self.head_params

    @property
    def activation_bytes(self) -> int:
        """Bytes that norms, rotary embedding, gates and residuals move per token over all layers.

        Read plus written: about ten passes over the residual stream, four over the queries and keys, four over the
        MLP's inner width. An estimate; what it misses is in the profile's per-layer overhead.
        """
        per_layer = 10 * self.hidden + 4 * (self.query_width + self.kv_width) + 4 * self.intermediate
        return per_layer * self.weight_itemsize * self.layers

    def kv_bytes_read(self, context: int) -> int:
        """KV bytes that one token reads whose context (itself included) has this many tokens."""
        full = (self.layers - self.window_layers) * context
        slid = self.window_layers * min(context, self.window) if self.window_layers else 0
        return 2 * self.kv_width * self.kv_itemsize * (full + slid)

    def attention_flops(self, start: int, length: int) -> int:
        """FLOPs of attention (QK^T and PV) over all layers for tokens `start .. start+length-1` of a sequence."""
        full = _pairs(start, length)
        slid = _pairs_within(start, length, self.window) if self.window_layers else 0
        return 4 * self.query_width * ((self.layers - self.window_layers) * full + self.window_layers * slid)


def _pairs(start: int, length: int) -> int:
    """Query-key pairs under a causal mask: the token at position p sees p + 1 keys."""
    return length * start + length * (length + 1) // 2


def _pairs_within(start: int, length: int, window: int) -> int:
    """The same where no token sees more than `window` keys."""
    growing = max(0, min(length, window - start))
    return _pairs(start, growing) + (length - growing) * window
