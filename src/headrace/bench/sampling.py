"""What sampling costs: the same batch greedy and sampled, alternating."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from headrace.bench.local_engine import LocalEngine
from headrace.bench.parity_prompts import random_prompts
from headrace.bench.progress import progress
from headrace.bench.workload import Item, items

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1}


@dataclass(frozen=True)
class SamplingCost:
    """Output tokens per second of each round."""

    greedy: list[float]
    sampled: list[float]

    def summary(self) -> dict[str, Any]:
        """Medians; `overhead` is the share of greedy throughput that sampling costs."""
        greedy, sampled = median(self.greedy), median(self.sampled)
        return {
            "greedy_tokens_per_s": round(greedy, 1),
            "sampled_tokens_per_s": round(sampled, 1),
            "overhead": round(1 - sampled / greedy, 4),
            "rounds": len(self.greedy),
        }


def measure(engine: LocalEngine, sequences: int = 64, outputs: int = 48, rounds: int = 3) -> SamplingCost:
    """Run `sequences` short prompts of `outputs` tokens each, greedy then sampled, `rounds` times."""
    prompts = [item.prompt for item in random_prompts(engine.info.vocab_size, [16] * sequences, outputs)]
    batches: dict[str, list[Item]] = {
        "greedy": items((prompt, outputs) for prompt in prompts),
        "sampled": items(((prompt, outputs) for prompt in prompts), **SAMPLED),
    }
    rates: dict[str, list[float]] = {"greedy": [], "sampled": []}
    engine.run(batches["sampled"][:4], salt="warm-up")
    with progress("greedy and sampled", 2 * rounds) as advance:
        for number in range(rounds):
            for kind, batch in batches.items():
                run = engine.run(batch, salt=f"{kind}-{number}")
                rates[kind].append(run.output_tokens_per_s)
                advance(1)
    return SamplingCost(rates["greedy"], rates["sampled"])
