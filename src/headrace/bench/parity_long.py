"""A random-weight model with a 64k context: one very long prompt, then decode, and its memory as predicted."""

import gc
from dataclasses import replace
from pathlib import Path

import psutil

from headrace.bench.local_engine import LocalEngine, with_cache
from headrace.bench.parity import Outcome
from headrace.bench.parity_prompts import random_prompts
from headrace.bench.parity_reference import Reference
from headrace.bench.tiny_models import VOCABULARY, save
from headrace.core.config import EngineConfig, StoreConfig
from headrace.model.memory import step_bytes

CONTEXT = 65536


def check_long(folder: Path, config: EngineConfig, length: int, outputs: int) -> tuple[Outcome, dict[str, float]]:
    """Run one prompt of `length` tokens through a tiny 64k-context model and judge it.

    Returns:
        The outcome, and bytes: what the run added to resident memory beyond what stood before the engine was built, and
        what was predicted: weights, the KV of the pages in use, position tables, one step's activations.
    """
    save("llama", folder, max_position_embeddings=CONTEXT, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    model = replace(config.model, model=str(folder), dtype="float32", tokenizer=None, max_model_len=0)
    base = with_cache(replace(config, model=model, store=StoreConfig(store=False)), kv_dtype="float32")
    process = psutil.Process()
    warm = LocalEngine(base)  # code, compiled kernels and thread pools are paid for before the counting starts
    warm.run(random_prompts(VOCABULARY, [600], 4))
    pages = -(-(length + outputs) // warm.info.page_size) + 8
    sized = with_cache(base, kv_memory=pages * (warm.info.kv_bytes // warm.info.pages))
    del warm
    gc.collect()
    before = process.memory_info().rss
    engine = LocalEngine(sized)
    batch = random_prompts(VOCABULARY, [length], outputs)
    run = engine.run(batch)
    grown = process.memory_info().rss - before
    used_pages = -(-(length + outputs) // engine.info.page_size)
    predicted = (
        engine.info.weight_bytes
        + used_pages * (engine.info.kv_bytes // engine.info.pages)
        + engine.decoder.table_bytes
        + step_bytes(engine.decoder.shape, sized.scheduler.max_num_batched_tokens)
    )
    del engine
    verdict = Reference(folder).judge(batch[0].prompt, run.outputs[batch[0].custom_id])
    return (
        Outcome("llama 64k", f"{length} tokens", [verdict]),
        {"long_grown_bytes": float(grown), "long_predicted_bytes": float(predicted)},
    )
