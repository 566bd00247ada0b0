"""Is the engine's greedy output what plain Transformers gives, however the engine came to it?

fp32. Our output is forced through plain Transformers; every token's logit must lie within 1e-3 standard deviations of
the best at its position. Equality with Transformers' own greedy output is counted beside it. The same prompts run
alone, batched, in odd chunks, with cached prefixes, after preemption, with one to three plans in flight, and with
prefixes that another engine has stored.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.local_engine import LocalEngine, with_cache, with_scheduler
from headrace.bench.parity_prompts import with_shared_prefixes
from headrace.bench.parity_reference import Reference, Verdict
from headrace.bench.workload import Item
from headrace.core.config import EngineConfig, StoreConfig

MODES = ("alone", "batched", "odd chunks", "prefix hits", "preempted", "2 plans", "3 plans", "stored")
_ODD_BUDGET = 37
_STORE_GIB = 8


@dataclass(frozen=True)
class Outcome:
    """One mode on one model.

    Attributes:
        model, mode: which.
        verdicts: one per output.
        fault: why the mode did not test what it should (no preemption, no hit); None: it did.
    """

    model: str
    mode: str
    verdicts: list[Verdict] = field(default_factory=list)
    fault: str | None = None

    @property
    def holds(self) -> bool:
        """True when every token is right and the mode did what it says."""
        return self.fault is None and all(verdict.holds for verdict in self.verdicts)

    @property
    def exact(self) -> int:
        """Outputs that equal Transformers' own."""
        return sum(verdict.exact for verdict in self.verdicts)

    @property
    def worst(self) -> float:
        """The largest margin."""
        return max((verdict.margin for verdict in self.verdicts), default=0.0)


def check(
    name: str,
    folder: Path,
    config: EngineConfig,
    batch: Sequence[Item],
    modes: Sequence[str] = MODES,
    advance: Callable[[int], None] = lambda units: None,
) -> list[Outcome]:
    """Run the batch in each mode and judge every output.

    Args:
        name: what to call the model in the outcomes.
        folder: of the model.
        config: of the engine; dtype, model and the settings that a mode varies are replaced.
        batch: greedy requests that ignore end-of-sequence, so that all outputs have their full length.
        modes: of `MODES`.
        advance: called with 1 after each mode.
    """
    model = replace(config.model, model=str(folder), dtype="float32", tokenizer=None)
    base = with_cache(replace(config, model=model, store=StoreConfig(store=False)), kv_dtype="float32")
    longest = _preempted_tokens(config) if "preempted" in modes else 0
    reference = Reference(folder, {tuple(item.prompt): longest for item in batch})
    outcomes = []
    for mode in modes:
        outcomes.append(_run_mode(name, mode, base, batch, reference))
        advance(1)
    return outcomes


def _run_mode(name: str, mode: str, base: EngineConfig, batch: Sequence[Item], reference: Reference) -> Outcome:
    fault = None
    if mode == "prefix hits":
        outputs, fault = _prefix_hits(base, batch)
    elif mode == "preempted":
        outputs, fault = _preempted(base, batch)
    elif mode == "stored":
        outputs, fault = _stored(base, batch)
    else:
        cold = with_cache(base, prefix_caching=False)
        if mode == "odd chunks":
            cold = with_scheduler(cold, max_num_batched_tokens=_ODD_BUDGET, max_num_seqs=min(32, _ODD_BUDGET))
        if mode.endswith(" plans"):
            cold = with_scheduler(cold, pipeline_depth=int(mode.split()[0]), max_num_batched_tokens=256)
        engine = LocalEngine(cold)
        outputs = []
        for group in [[item] for item in batch] if mode == "alone" else [list(batch)]:
            run = engine.run(group)
            outputs += [(item, run.outputs[item.custom_id]) for item in group]
    short = next((item.custom_id for item, tokens in outputs if len(tokens) != item.max_tokens), None)
    if short is not None:
        fault = f"request {short} ended before its length"
    verdicts = [reference.judge(item.prompt, tokens) for item, tokens in outputs if tokens]
    return Outcome(name, mode, verdicts, fault)


Outputs = list[tuple[Item, list[int]]]


def _prefix_hits(base: EngineConfig, batch: Sequence[Item]) -> tuple[Outputs, str | None]:
    """The prompts twice, the second time from the cache, and prompts that share a part of them."""
    engine = LocalEngine(with_cache(base, prefix_caching=True))
    page = engine.info.page_size
    first = engine.run(batch)
    again = [Item(f"{item.custom_id}-again", item.prompt, item.params) for item in batch]
    second = [*again, *with_shared_prefixes(batch, page)]
    run = engine.run(second)
    outputs = [(item, first.outputs[item.custom_id]) for item in batch]
    outputs += [(item, run.outputs[item.custom_id]) for item in second]
    longest = max(len(item.prompt) for item in batch)
    fault = None if longest <= page or run.hit_tokens else "no prompt token came from the cache"
    return outputs, fault


def _preempted_tokens(config: EngineConfig) -> int:
    """Tokens each request generates to be preempted: a request is admitted with a page to spare, so it needs more."""
    return 3 * config.cache.page_size


def _preempted(base: EngineConfig, batch: Sequence[Item]) -> tuple[Outputs, str | None]:
    """A pool that holds the longest request and little more, so that running sequences lose their pages.

    The longest comes first, and all go on for three pages: what is admitted beside it grows past what there is.
    """
    page = base.cache.page_size
    work = [
        replace(item, params=msgspec.structs.replace(item.params, max_tokens=_preempted_tokens(base)))
        for item in sorted(batch, key=lambda item: -len(item.prompt))
    ]
    probe = LocalEngine(base)
    page_bytes = probe.info.kv_bytes // probe.info.pages
    del probe
    pages = max(-(-(len(item.prompt) + item.max_tokens) // page) for item in work) + 1
    small = with_cache(base, kv_memory=pages * page_bytes)
    engine = LocalEngine(with_scheduler(small, max_num_seqs=max(len(work), 2)))
    run = engine.run(work)
    fault = None if run.preemptions else f"nothing was preempted with {pages} KV pages"
    return [(item, run.outputs[item.custom_id]) for item in work], fault


def _stored(base: EngineConfig, batch: Sequence[Item]) -> tuple[Outputs, str | None]:
    """The prompts, and others that share a part of them, on an engine that finds what one before it has stored."""
    chunk = 2 * base.cache.page_size
    with tempfile.TemporaryDirectory(prefix="headrace-parity-") as folder:
        tiers = (f"dir:{folder}:{_STORE_GIB}GiB",)
        config = replace(base, store=StoreConfig(tier=tiers, chunk_tokens=chunk, replication="all"))
        first = LocalEngine(config)
        run = first.run(batch)
        outputs = [(item, run.outputs[item.custom_id]) for item in batch]
        first.engine.close(timeout=60.0)
        second = LocalEngine(config)
        work = [*batch, *with_shared_prefixes(batch, chunk)]
        run = second.run(work)
        outputs += [(item, run.outputs[item.custom_id]) for item in work]
        loads = second.stats().loads_total
        second.engine.close()
    longest = max(len(item.prompt) for item in batch)
    return outputs, None if longest <= chunk or loads else "no prefix was loaded from the store"


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts and the worst margin as one flat object."""
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts]
    broken = [outcome for outcome in outcomes if not outcome.holds]
    apart = [verdict for verdict in verdicts if not verdict.exact]
    return {
        "holds": not broken,
        "outputs": len(verdicts),
        "exact": len(verdicts) - len(apart),
        "near_ties": sum(verdict.holds for verdict in apart),
        "broken_outputs": sum(not verdict.holds for verdict in verdicts),
        "worst_margin": max((verdict.margin for verdict in verdicts), default=0.0),
        "modes": len(outcomes),
        "broken": [f"{o.model}, {o.mode}: {o.fault or 'margin ' + format(o.worst, '.2e')}" for o in broken],
    }
