"""One run where a GPU is at hand: is the CUDA path right, and how fast is it? `make gpu-check`, under 8 minutes.

Right: logits of tiny models of several families and of a mid-size Llama, in float32 and bfloat16, on every way through
the engine, against plain Transformers on the GPU; and greedy tokens of whole engines. Fast: decode and prefill of a
random Llama as large as 8 billion weights, with and without graphs. Prints one JSON object. Exit code 1 when something
is not right or fails, 2 where there is no GPU. Not run on a GPU yet.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headrace.bench import batch_mixes, batch_orders, gpu_parity, gpu_records, gpu_speed, parity, pipeline
from headrace.bench.local_engine import LocalEngine, with_pool_of
from headrace.bench.parity_prompts import random_prompts
from headrace.bench.random_decoder import LLAMA_8B, layers_that_fit
from headrace.bench.report import report
from headrace.bench.tiny_models import VOCABULARY, save
from headrace.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, StoreConfig

#: Rotary, sliding windows, soft-caps, learned positions, experts.
FAMILIES = ("llama", "mistral", "gemma2", "opt", "qwen3-moe")
MODES = ("alone", "batched", "odd chunks", "prefix hits", "preempted", "stored")
MIDDLE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "initializer_range": 0.05,
}
_KV_BYTES = 512 << 20
_LENGTHS = (1, 16, 17, 129, 513)

Section = Callable[[], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser("gpu_check", description="Check and measure the CUDA path on this machine's GPU.")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no further part after this long")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device is here; this check needs one", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 where numbers are compared
    torch.backends.cudnn.allow_tf32 = False
    with TemporaryDirectory() as scratch:
        result = {"device": torch.cuda.get_device_name(), **run(sections(Path(scratch), "cuda"), chosen.seconds)}
    report("GPU check", result, as_json=chosen.json)
    return 0 if result["holds"] else 1


def sections(
    scratch: Path,
    device: str,
    middle: dict[str, Any] = MIDDLE,
    large: dict[str, Any] = LLAMA_8B,
    families: Sequence[str] = FAMILIES,
    threads: int = 0,
    **sizes: Any,
) -> dict[str, Section]:
    """The parts of the check by name, the most telling first.

    Args:
        scratch: where models are written.
        device: `cuda`; `cpu` for tests of this check.
        middle: settings of the mid-size Llama.
        large: settings of the Llama that is measured.
        families: tiny models.
        threads: CPU threads; 0: all cores.
        sizes: for `gpu_speed.measure`.
    """

    def folder(name: str) -> Path:
        path = scratch / name
        if not path.exists():
            save("llama" if name == "middle" else name, path, **(middle if name == "middle" else {}))
        return path

    def logits(names: Sequence[str]) -> dict[str, Any]:
        checks = [
            check
            for name in names
            for dtype in ("float32", "bfloat16")
            for check in gpu_parity.check(name, folder(name), dtype, device, threads)
        ]
        worst = max(checks, key=lambda check: check.error / check.allowed)
        broken = [str(check) for check in checks if not check.holds]
        return {"holds": not broken, "checks": len(checks), "worst": str(worst), "broken": broken}

    def tokens(name: str, vocabulary: int) -> dict[str, Any]:
        config = EngineConfig(model=ModelConfig(device=device, threads=threads), cache=CacheConfig(kv_memory=_KV_BYTES))
        return parity.summary(parity.check(name, folder(name), config, random_prompts(vocabulary, _LENGTHS, 12), MODES))

    def speed() -> dict[str, Any]:
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else sys.maxsize
        fitting = {**large, "num_hidden_layers": layers_that_fit(large, 2, free)}
        return gpu_speed.measure(fitting, device, "bfloat16", **sizes)

    return {
        "tiny_logits": lambda: logits(families),
        "middle_logits": lambda: logits(["middle"]),
        "speed": speed,
        "engine": lambda: engine_rates(folder("middle"), device, int(middle["vocab_size"])),
        "orders": lambda: order_rates(folder("middle"), device, int(middle["vocab_size"])),
        "records": lambda: gpu_records.check(device),
        "pipeline": lambda: pipeline_rates(folder("middle"), device),
        "tiny_tokens": lambda: tokens(families[0], VOCABULARY),
        "middle_tokens": lambda: tokens("middle", int(middle["vocab_size"])),
    }


def run(parts: dict[str, Section], seconds: float) -> dict[str, Any]:
    """Results of the parts as one flat object. A part that fails says so in `failed` and the others go on; one that
    was not begun in time is in `skipped`. It `holds` only if all were right."""
    started = time.perf_counter()
    result: dict[str, Any] = {}
    failed: list[str] = []
    skipped: list[str] = []
    for name, part in parts.items():
        begun = time.perf_counter()
        if begun - started > seconds:
            skipped.append(name)
            continue
        try:
            found = part()
        except Exception as error:  # an hour on a borrowed GPU must tell all it can: reported, and the exit code is 1
            failed.append(f"{name}: {type(error).__name__}: {error}")
        else:
            result |= {f"{name}_{key}": value for key, value in found.items()}
        result[f"{name}_s"] = round(time.perf_counter() - begun, 1)
        gc.collect()
        torch.cuda.empty_cache()
    right = all(value for key, value in result.items() if key.endswith("_holds"))
    return {"holds": right and not failed and not skipped, "failed": failed, "skipped": skipped, **result}


def engine_rates(folder: Path, device: str, vocabulary: int, sequences: int = 64, outputs: int = 64) -> dict[str, Any]:
    """Tokens per second of a whole engine, scheduler and sampler included, with graphs and without."""
    batch = random_prompts(vocabulary, [32] * sequences, outputs)
    found: dict[str, Any] = {}
    for graphs in (True, False):
        engine = LocalEngine(
            EngineConfig(
                model=ModelConfig(model=str(folder), device=device, dtype="bfloat16", cuda_graphs=graphs),
                cache=CacheConfig(kv_memory=_KV_BYTES),
                scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048),
            )
        )
        engine.run(batch, salt="warm-up")  # graphs of every bucket of the tail are captured here
        name = "graphs" if graphs else "eager"
        found[f"{name}_output_tokens_per_s"] = round(engine.run(batch, salt="timed").output_tokens_per_s, 1)
        del engine
        gc.collect()
    return found


def order_rates(folder: Path, device: str, vocabulary: int, mix: str = "even", rounds: int = 2) -> dict[str, Any]:
    """Seconds of an offline job depth first and blended, with decode and prompt rows side by side and without."""
    found: dict[str, Any] = {}
    for overlap in (False, True):
        config = EngineConfig(
            model=ModelConfig(model=str(folder), device=device, dtype="bfloat16", overlap=overlap),
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
            store=StoreConfig(store=False),
        )
        engine = LocalEngine(with_pool_of(config, 8064))
        name = "overlap" if overlap else "plain"
        job = batch_mixes.make_job(mix, vocab_size=min(40_000, vocabulary))
        runs = batch_orders.measure(engine, job, ("dfs", "blend"), rounds=rounds, salt=name, exact=False)
        for order in runs.runs:
            found[f"{name}_{order}_s"] = round(runs.seconds(order), 3)
        del engine
        gc.collect()
    found["blend_over_dfs_with_overlap"] = round(found["overlap_dfs_s"] / found["overlap_blend_s"], 3)
    return found


def pipeline_rates(
    folder: Path, device: str, prefix_chunks: int = 24, suffix_tokens: int = 512, rounds: int = 3
) -> dict[str, Any]:
    """How a new suffix and its stored prefix, which load and compute equally long, overlap: `bench pipeline`."""
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device=device, dtype="bfloat16"),
        cache=CacheConfig(kv_memory=_KV_BYTES),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=max(512, suffix_tokens)),
    )
    summary = pipeline.measure(config, prefix_chunks, suffix_tokens, rounds).summary()
    return {name: summary[name] for name in ("load_s", "compute_s", "both_s", "ratio_to_max", "ratio_to_sum")}


if __name__ == "__main__":
    sys.exit(main())
