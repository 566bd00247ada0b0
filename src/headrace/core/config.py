"""The configuration: one tree of frozen dataclasses, from which flags and `HEADRACE_*` variables are generated."""

from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import ConfigError

#: Seconds: an engine says once a second that its steps end, and a slow step must not look like the end of them.
MIN_STEP_TIMEOUT = 5.0
#: Sequences at once and rows of a step have memory of their own; more than these is a slip of the finger.
MAX_SEQS, MAX_STEP_TOKENS = 1 << 16, 1 << 20


def option(default: Any, help: str, **extra: Any) -> Any:
    """A configuration field with its help text; `extra` may hold `choices`, `flag`, `bytes=True` or `seconds=True`."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class ModelConfig:
    """Which model to run and how."""

    model: str = option("default", "model to serve: 'default', a local folder, a .gguf file, or a Hugging Face id")
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id")
    tokenizer: str | None = option(None, "folder or id of the tokenizer, where it is not the model's")
    dtype: str = option("auto", "type of weights and computation", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    threads: int = option(0, "CPU threads of the engine; 0: all cores")
    cuda_graphs: bool = option(True, "on CUDA, replay decode steps as captured graphs")
    overlap: bool = option(
        False, "run decode and prompt rows of a step side by side on two CUDA streams (not run on a GPU yet)"
    )
    max_model_len: int = option(0, "longest prompt plus output in tokens; 0: what the model supports and memory allows")
    seed: int = option(0, "seed of the seeds given to requests that bring none; 0: from the system")


@dataclass(frozen=True)
class CacheConfig:
    """The KV pool."""

    kv_memory: int = option(0, "bytes of the KV pool, e.g. 2GiB; 0: a share of free memory", bytes=True)
    page_size: int = option(16, "tokens per KV page", choices=(8, 16, 32, 64))
    kv_dtype: str = option("auto", "type of stored KV", choices=("auto", "float32", "bfloat16", "float16"))
    prefix_caching: bool = option(True, "reuse the KV of prompt prefixes seen before")


@dataclass(frozen=True)
class SchedulerConfig:
    """How steps are formed."""

    max_num_seqs: int = option(64, "sequences that may hold KV at once")
    max_num_batched_tokens: int = option(512, "tokens of one step at most")
    max_queue: int = option(1024, "requests that may be in flight in the engine; more are refused with 429")
    itl_target: float = option(0.0, "aim at this time between tokens, e.g. 150ms; 0: throughput first", seconds=True)
    pipeline_depth: int = option(1, "step plans outstanding at once (micro-batches in flight over spans)")
    step_timeout: float = option(
        300.0, "give an engine up that has requests and ends no step for this long; 0: never", seconds=True
    )


@dataclass(frozen=True)
class StoreConfig:
    """The KV store: prefixes that outlive the pool and the process."""

    store: bool = option(True, "keep the KV of prefixes in storage tiers and load it from there")
    tier: tuple[str, ...] = option(
        (),
        "a storage tier, may be given several times: memory:4GiB, dir:/path:100GiB, dir:/path:100GiB:cluster; "
        "none: a small one in memory and one in HEADRACE_HOME/store",
    )
    chunk_tokens: int = option(128, "tokens of a stored chunk, a multiple of --page-size")
    store_ttl: float = option(7 * 86400.0, "forget what was not used for this long; 0: never", seconds=True)
    write_queue: int = option(256 << 20, "bytes that may wait to be written to tiers; more is not saved", bytes=True)
    replication: str = option(
        "auto",
        "tiers a new chunk is saved to; auto: none, one or all, as the reuse seen repays it",
        choices=("auto", "all", "one", "none"),
    )
    read_policy: str = option(
        "completion",
        "how tiers share reads: each takes more as it finishes, a fixed split, or one request and tier at a time",
        choices=("completion", "static", "sequential"),
    )
    load_overlap: bool = option(
        True, "compute while stored KV is on its way; off: no step begins before all loads under way have ended"
    )
    recompute: bool = option(
        True, "where storage is slow, compute the front of a stored prefix while the rest is on its way"
    )
    deferred_writes: bool = option(
        True, "write to tiers while a forward pass runs or nothing does, never ahead of reads; off: at once"
    )


@dataclass(frozen=True)
class EngineConfig:
    """Everything one engine needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    store: StoreConfig = field(default_factory=StoreConfig)


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP front."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on")
    api_key: str | None = option(None, "key that clients must send as a bearer token")
    served_model_name: str | None = option(None, "name of the model in the API; default: its id")
    chat_template: str | None = option(None, "file with a Jinja chat template, in place of the model's")
    generation_config: bool = option(True, "take default sampling parameters from the model's generation_config.json")
    max_request_bytes: int = option(16 << 20, "largest request body", bytes=True)
    max_file_bytes: int = option(1 << 30, "largest file that may be uploaded for a batch", bytes=True)
    max_files_bytes: int = option(16 << 30, "bytes of all uploaded files and results of batches together", bytes=True)
    max_connections: int = option(512, "requests served at once; more get 429")
    drain_timeout: float = option(30.0, "after SIGTERM, wait this long for running requests", seconds=True)
    request_timeout: float = option(0.0, "end a request after this long; 0: never", seconds=True)
    log_level: str = option("info", "least severe log to print", choices=("debug", "info", "warning", "error"))
    log_requests: bool = option(False, "log each request's numbers as one JSON line (never its text)")
    allowed_origins: str = option("", "comma-separated origins for CORS; empty: none")
    tool_parser: str = option("auto", "dialect of tool calls", choices=("auto", "hermes", "none"))
    reasoning_parser: str = option("auto", "how reasoning is marked", choices=("auto", "think", "none"))


@dataclass(frozen=True)
class Config:
    """The whole tree: what `headrace serve` takes."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def check(config: EngineConfig) -> None:
    """What can be said about the numbers of an engine before anything is loaded.

    Raises:
        ConfigError: one is out of range.
    """
    limits = config.scheduler
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue", "pipeline_depth"):
        _at_least(1, name, getattr(limits, name))
    _at_most(MAX_SEQS, "max_num_seqs", limits.max_num_seqs)
    _at_most(MAX_STEP_TOKENS, "max_num_batched_tokens", limits.max_num_batched_tokens)
    _at_least(0, "itl_target", limits.itl_target)
    if limits.step_timeout and limits.step_timeout < MIN_STEP_TIMEOUT:
        least = f"0 (never) or at least {MIN_STEP_TIMEOUT:g}s"
        raise ConfigError(f"--step-timeout must be {least}, got {limits.step_timeout:g}s")
    _at_least(0, "threads", config.model.threads)
    _at_least(0, "kv_memory", config.cache.kv_memory)
    _at_least(0, "max_model_len", config.model.max_model_len)
    _at_least(0, "store_ttl", config.store.store_ttl)
    _at_least(1, "write_queue", config.store.write_queue)
    chunk, page = config.store.chunk_tokens, config.cache.page_size
    if chunk < page or chunk % page:
        raise ConfigError(f"--chunk-tokens must be a multiple of --page-size ({page}), got {chunk}")


def _at_least(least: int, name: str, value: float) -> None:
    if value < least:
        raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def _at_most(most: int, name: str, value: int) -> None:
    if value > most:
        raise ConfigError(f"--{name.replace('_', '-')} must be at most {most}, got {value}")
