"""One worker's loop: scheduler (policy) -> runner -> sampler, over a KV pool with a prefix index.

May import `core`, `model`, `kernels` and `perf`.
"""
