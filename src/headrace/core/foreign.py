"""Names that vLLM has for settings, and what to say to those who bring them along."""

#: The way out, by the name as a configuration field (underscores, no dashes in front).
WAYS_OUT = {
    "enable_prefix_caching": "prefix caching is on already; --no-prefix-caching turns it off",
    "no_enable_prefix_caching": "use --no-prefix-caching",
    "tensor_parallel_size": "tensor parallelism is not there yet; leave it out to run on one device",
    "pipeline_parallel_size": "pipeline parallelism is not there yet; leave it out to run on one device",
    "gpu_memory_utilization": "say how much the KV pool may take with --kv-memory, e.g. --kv-memory 8GiB",
    "kv_cache_memory_bytes": "use --kv-memory",
    "kv_cache_dtype": "use --kv-dtype",
    "block_size": "use --page-size",
    "enforce_eager": "use --no-cuda-graphs",
    "disable_log_requests": "requests are not logged unless --log-requests is given; leave it out",
    "enable_chunked_prefill": "prefill is always chunked; --max-num-batched-tokens bounds the chunks",
}


def way_out(name: str) -> str:
    """`; ` and what to do in place of a setting that we do not have, for a flag, variable or key; or nothing."""
    known = WAYS_OUT.get(name.removeprefix("--").replace("-", "_").lower())
    return f"; {known}" if known else ""
