"""One run where a GPU is at hand: is the CUDA path right, and how fast is it? `make gpu-check`, under 8 minutes.

Parity in fp32 on tiny models of several families and, where it can be fetched, on the default model; then the mixed
workload in bfloat16. Prints one JSON object; exit code 1 when parity is broken, 2 where there is no GPU.
Not run on a GPU yet.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headrace.bench import throughput
from headrace.bench.local_engine import LocalEngine, model_folder, tokenizer_of
from headrace.bench.parity import Outcome, check, summary
from headrace.bench.parity_prompts import SHORT_LENGTHS, random_prompts, text_prompts
from headrace.bench.report import print_json
from headrace.bench.tiny_models import VOCABULARY, save
from headrace.bench.workload import mixed
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.errors import HeadraceError
from headrace.kernels.attention import backend_for
from headrace.kernels.measure import measure

FAMILIES = ("llama", "gemma2", "qwen3-moe")
MODES = ("alone", "batched", "odd chunks", "prefix hits", "preempted")
_LENGTHS = (1, 16, 17, 129, 513, 1500)


def main() -> int:
    """Run the check; returns the exit code."""
    if not torch.cuda.is_available():
        print("no CUDA device is here; this check needs one", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32 where tokens are compared
    torch.backends.cudnn.allow_tf32 = False
    started = time.perf_counter()
    config = EngineConfig(model=ModelConfig(device="cuda", dtype="float32"))
    outcomes: list[Outcome] = []
    result: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    with TemporaryDirectory() as scratch:
        for family in FAMILIES:
            folder = save(family, Path(scratch) / family)
            outcomes += check(family, folder, config, random_prompts(VOCABULARY, SHORT_LENGTHS, 12), MODES)
    try:
        folder = model_folder(config)
    except HeadraceError as error:
        result["default_model"] = f"not checked: {error}"
    else:
        outcomes += check("default", folder, config, text_prompts(tokenizer_of(folder), _LENGTHS, 16), MODES)
        result |= _speed(config)
    result = {**summary(outcomes), **result, "seconds": round(time.perf_counter() - started, 1)}
    print_json(result)
    return 0 if result["holds"] else 1


def _speed(config: EngineConfig) -> dict[str, Any]:
    """Attention rates, and the mixed workload in bfloat16."""
    rates = measure(backend_for("cuda"), kv_dtype="bfloat16", rounds=5)
    engine = LocalEngine(replace(config, model=replace(config.model, dtype="bfloat16")))
    run = throughput.measure(engine, mixed(), rounds=3).summary()
    return {f"attention_{name}": round(rate, 4) for name, rate in rates.items()} | {
        f"mixed_{name}": value for name, value in run.items()
    }


if __name__ == "__main__":
    sys.exit(main())
