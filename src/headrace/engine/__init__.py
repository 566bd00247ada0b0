"""One worker's loop: scheduler (policy) -> runner -> sampler, over a KV pool with a prefix index.

May import `core`, `model`, `kernels`, `perf` and `store`.
"""

import os

from headrace.engine.environment import SPIN_COUNT

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded, which an in-process engine does later
