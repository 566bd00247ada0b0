from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench.local_engine import with_cache
from headrace.bench.parity import MODES, Outcome, check, summary
from headrace.bench.parity_long import check_long
from headrace.bench.parity_prompts import LENGTHS, pseudo_text, random_prompts, text_prompts, with_shared_prefixes
from headrace.bench.parity_reference import TOLERANCE, Reference, Verdict
from headrace.bench.tiny_models import FAMILIES, VOCABULARY, save
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError

SMALL = with_cache(EngineConfig(), kv_memory=16 << 20)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_mode_keeps_parity(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    outcomes = check(family, folder, SMALL, random_prompts(VOCABULARY, (1, 15, 16, 17, 33, 70), 6))
    assert [outcome.mode for outcome in outcomes] == list(MODES)
    assert [outcome.fault for outcome in outcomes] == [None] * len(MODES)
    assert max(outcome.worst for outcome in outcomes) <= TOLERANCE
    result = summary(outcomes)
    assert result["holds"]
    assert result["outputs"] == 6 * (len(MODES) + 4)  # two modes have a second pass and prompts that share prefixes
    assert result["exact"] + result["near_ties"] == result["outputs"]


def test_a_wrong_token_breaks_parity(tiny: Path) -> None:
    reference = Reference(tiny)
    prompt = [5, 6, 7, 8]
    right = reference.greedy(prompt, 6)
    good = reference.judge(prompt, right)
    assert good.exact
    assert good.holds
    assert good.margin == 0
    wrong = [*right[:3], (right[3] + 1) % 512, *right[4:]]
    bad = reference.judge(prompt, wrong)
    assert not bad.holds
    assert bad.divergence == 3
    assert bad.divergence_margin > TOLERANCE
    assert not summary([Outcome("m", "alone", [good, bad])])["holds"]


def test_a_mode_that_did_not_do_what_it_says_counts_as_broken() -> None:
    outcome = Outcome("m", "preempted", [Verdict(0.0, True)], "nothing was preempted")
    assert not outcome.holds
    assert summary([outcome])["broken"] == ["m, preempted: nothing was preempted"]


def test_preemption_that_cannot_happen_is_reported(tiny: Path) -> None:
    (outcome,) = check("tiny", tiny, SMALL, random_prompts(512, (4,), 3), ["preempted"])
    assert outcome.fault is not None
    assert "nothing was preempted" in outcome.fault


def test_a_long_context_and_its_memory(tmp_path: Path) -> None:
    outcome, memory = check_long(tmp_path, SMALL, 3000, 4)
    assert outcome.holds
    assert memory["long_predicted_bytes"] > 3000 * 768
    assert memory["long_grown_bytes"] < memory["long_predicted_bytes"] + (64 << 20)


def test_prompts_have_their_lengths_and_are_the_same_each_time() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text[::3]]

    assert len(LENGTHS) >= 30
    assert (min(LENGTHS), max(LENGTHS)) == (1, 3000)
    batch = text_prompts(Letters(), LENGTHS, 5)
    assert tuple(len(item.prompt) for item in batch) == LENGTHS
    assert batch == text_prompts(Letters(), LENGTHS, 5)
    assert len({tuple(item.prompt[:9]) for item in batch}) > 10
    assert len(pseudo_text(50, 1).split()) >= 50


def test_shared_prefixes_are_cut_around_page_edges() -> None:
    batch = random_prompts(100, (64, 65, 200, 3), 2)
    cuts = set()
    for item, origin in zip(with_shared_prefixes(batch, 16), batch, strict=True):
        tail = len(batch[(batch.index(origin) + 1) % len(batch)].prompt[:7])
        cut = len(item.prompt) - tail
        assert item.prompt[:cut] == origin.prompt[:cut]
        cuts.add(cut)
    assert cuts == {31, 32, 97, 3}


def test_every_family_that_must_work_is_there() -> None:
    assert {"llama", "smollm", "mistral", "qwen2", "qwen3", "opt", "gemma2", "gemma3", "phi3", "qwen3-moe"} <= set(
        FAMILIES
    )


def test_a_pool_that_cannot_hold_the_prompt_is_told(tiny: Path) -> None:
    config = replace(SMALL, model=replace(SMALL.model, max_model_len=4096))
    with pytest.raises(ConfigError, match=r"kv_memory|kv-memory"):
        check("tiny", tiny, with_cache(config, kv_memory=1 << 16), random_prompts(512, (4,), 2), ["alone"])
