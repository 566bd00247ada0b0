"""Batches of requests without a deadline each: planning a whole job, and running it.

Two halves: `planning` imports `core` and `perf` only, so that a simulator can use it; `jobs` imports `core`, `front`
and `planning`.
"""
