"""What an engine reports back: tokens as they come, and its own state."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the raw distribution (before penalties, temperature and truncation).

    Attributes:
        token: the token that stands there.
        logprob: its log-probability.
        rank: its rank, 1 for the most probable.
        top: the most probable tokens with their log-probabilities, best first.
    """

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request.

    Attributes:
        request: the request's id.
        tokens: token ids produced since the last delta (a stop token is included; the front leaves it out of the text).
        finish: set in the last delta of a request.
        stop_token: the token id that ended the request, where one did.
        logprobs: one entry per token where asked for.
        prompt_logprobs: in the first delta where asked for; the first prompt token has none.
        cached_tokens: in the first delta, prompt tokens that were not computed because their KV was at hand.
        error: what went wrong, with finish `error`.
        cached_by_source: in the first delta, `cached_tokens` by where they came from: `pool`, or a tier's name.
    """

    request: str
    tokens: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    error: str | None = None
    cached_by_source: dict[str, int] | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine; counters (`*_total`) only grow.

    Attributes:
        waiting: requests in the queue.
        running: requests that hold KV pages.
        pages_total: KV pages of the pool.
        pages_used: pages held by running requests (cached pages nobody holds are free).
        prompt_tokens_total: prompt tokens of admitted requests.
        hit_tokens_total: prompt tokens whose KV was in the pool or came from the store, counted once, at the first
            admission (the store's when they have arrived).
        hit_tokens_by_source: the same by source: `pool`, or a tier's name. With those computed they add up to
            `prompt_tokens_total` once nothing is loading.
        computed_tokens_total: tokens that went through the model.
        output_tokens_total: tokens generated.
        preemptions_total: running requests sent back to the queue.
        abandoned_total: offline steps given up for online work.
        steps_total: forward passes completed.
        step_seconds_total: time spent in them.
        compute_seconds_total: what the device's profile says of their compute-bound work.
        memory_seconds_total: the same of their memory-bound work: reading the KV of decoding sequences.
        attention_seconds_total: time spent in attention, of either kind; 0 where it is not known (captured graphs).
        requests_total: requests finished, by reason.
        loads_total: stored prefixes asked for.
        loads_failed_total: those of which some part was missing or wrong; the rest was computed.
        load_wait_seconds_total: time that forward passes stood still for stored KV.
        store: the store's counters by name, at most about a second old; empty without a store.
        store_tiers: counters of each tier by tier and name.
    """

    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_used: int = 0
    prompt_tokens_total: int = 0
    hit_tokens_total: int = 0
    hit_tokens_by_source: dict[str, int] = {}
    computed_tokens_total: int = 0
    output_tokens_total: int = 0
    preemptions_total: int = 0
    abandoned_total: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    compute_seconds_total: float = 0.0
    memory_seconds_total: float = 0.0
    attention_seconds_total: float = 0.0
    requests_total: dict[str, int] = {}
    loads_total: int = 0
    loads_failed_total: int = 0
    load_wait_seconds_total: float = 0.0
    store: dict[str, float] = {}
    store_tiers: dict[str, dict[str, float]] = {}


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself once it is ready.

    Attributes:
        model: the model's name as configured.
        path: folder with its configuration, weights and tokenizer.
        fingerprint: hex digest of weights, config, dtype and format; KV is shared only under the same one.
        max_model_len: prompt plus output tokens a sequence may have.
        vocab_size: rows of the logits.
        eos_token_ids: tokens that end a sequence unless it ignores them.
        dtype: of the computation, e.g. `float32`.
        device: e.g. `cpu`.
        device_name: the processor's or accelerator's own name; empty: not known.
        overlap: decode and prompt rows of a step run side by side.
        page_size: tokens per KV page.
        pages: KV pages of the pool.
        kv_bytes: bytes of the pool.
        weight_bytes: bytes of the weights.
        load_seconds: time it took to become ready.
        pid: the engine's process id.
        store: the KV store in words, e.g. `memory 1GiB, dir:/x 20GiB`; empty without one.
    """

    model: str
    path: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    page_size: int
    pages: int
    kv_bytes: int
    weight_bytes: int
    load_seconds: float
    pid: int
    store: str = ""
    device_name: str = ""
    overlap: bool = False
