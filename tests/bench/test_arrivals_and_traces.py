from pathlib import Path

import numpy as np
import pytest

from headrace.bench.arrivals import gamma_arrivals
from headrace.bench.serve import calls_from_trace, default_calls, limited, schedule
from headrace.bench.traces import MOONCAKE_BLOCK, read_trace, synthesise
from headrace.core.errors import ConfigError

DATA = Path(__file__).parent.parent / "data"
AZURE, MOONCAKE = DATA / "azure_conv_excerpt.csv", DATA / "mooncake_conversation_excerpt.jsonl"


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    times = gamma_arrivals(40_000, rate=5.0, cv=cv, seed=1)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert times == gamma_arrivals(40_000, rate=5.0, cv=cv, seed=1)


def test_the_edges_of_arrivals() -> None:
    assert gamma_arrivals(4, rate=2.0, cv=0) == [0, 0.5, 1.0, 1.5]
    assert gamma_arrivals(3, rate=float("inf"), cv=1) == [0, 0, 0]
    assert gamma_arrivals(0, rate=1, cv=1) == []
    for rate, cv in ((0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, -1.0), (1.0, float("nan"))):
        with pytest.raises(ConfigError):
            gamma_arrivals(1, rate, cv)


def test_the_azure_format() -> None:
    entries = read_trace(AZURE)
    assert len(entries) == 40
    assert (entries[0].time, entries[0].prompt_tokens, entries[0].output_tokens) == (0.0, 374, 44)
    assert entries[1].time == pytest.approx(4.3144, abs=1e-3)
    assert [len(p) for p in synthesise(entries, 1000)] == [entry.prompt_tokens for entry in entries]


def test_the_mooncake_format_shares_blocks() -> None:
    entries = read_trace(MOONCAKE, limit=6)
    assert len(entries) == 6
    assert entries[0].prompt_tokens == 6758
    prompts = synthesise(entries, 1000)
    assert [len(p) for p in prompts] == [entry.prompt_tokens for entry in entries]
    for a in range(6):
        for b in range(a):
            common = 0
            for x, y in zip(entries[a].blocks, entries[b].blocks):
                if x != y:
                    break
                common += 1
            tokens = common * MOONCAKE_BLOCK
            assert prompts[a][:tokens] == prompts[b][:tokens]
            assert prompts[a][tokens : tokens + 32] != prompts[b][tokens : tokens + 32]
    assert all(100 <= token < 1000 for token in prompts[0])


def test_prompts_can_be_cut() -> None:
    entries = read_trace(MOONCAKE, limit=2)
    full, cut = synthesise(entries, 1000), synthesise(entries, 1000, max_prompt=700)
    assert [p[:700] for p in full] == cut
    with pytest.raises(ConfigError, match="vocab-size"):
        synthesise(entries, 100)


def test_lengths_without_times(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,42,285\nXXX,0,82\nXXX,19,82\n")
    entries = read_trace(path)
    assert [(e.time, e.prompt_tokens) for e in entries] == [(None, 42), (None, 19)]
    calls = calls_from_trace(path, limit=0, vocabulary=500, max_prompt=0, time_scale=1)
    with pytest.raises(ConfigError, match="--rate"):
        schedule(calls, None, 1.0, 0)
    assert len(schedule(calls, 3.0, 1.0, 0)) == 2


def test_calls_of_a_trace_keep_its_times_stretched() -> None:
    calls = calls_from_trace(AZURE, limit=3, vocabulary=500, max_prompt=50, time_scale=2.0)
    assert schedule(calls, None, 1.0, 0)[1] == pytest.approx(8.6288, abs=1e-2)
    assert [call.body["max_tokens"] for call in limited(calls, 2, 50)] == [44, 50]
    assert len(limited(default_calls(), 0, 0)) == 64
    with pytest.raises(ConfigError, match="time-scale"):
        calls_from_trace(AZURE, limit=3, vocabulary=500, max_prompt=0, time_scale=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "neither an Azure CSV"),
        ("", "neither"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,many,1\n", "line 2"),
        ('{"timestamp": 0}\n', "line 1 is not a Mooncake entry"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "1 hash ids for 600"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "missing")
