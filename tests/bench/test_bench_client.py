import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from served import Served, serve_parrot

from headrace.bench.latency_stats import Observed, meets, parse_slo, summarise
from headrace.bench.serve import Call, calls_from_file, calls_from_items, run
from headrace.bench.stream_client import Endpoint
from headrace.bench.workload import CHAT, COMPLETIONS, items, write_requests
from headrace.core.config import ServerConfig
from headrace.core.errors import ConfigError


def observed(due: float, arrivals: list[float], end: float, **more: Any) -> Observed:
    return Observed(due=due, sent=due + 0.001, arrivals=arrivals, end=end, output_tokens=len(arrivals), **more)


def test_latencies_by_hand() -> None:
    seen = [
        observed(10.0, [10.5, 10.6, 10.9], 11.0, prompt_tokens=7, cached_tokens=3),
        observed(11.0, [11.1, 11.2, 11.3], 12.0, prompt_tokens=5),
        Observed(due=11.5, sent=11.5, end=11.6, error="429 busy"),
        observed(11.5, [], 11.7),
    ]
    result = summarise(seen, {"ttft": 0.4})
    assert (result["requests"], result["completed"], result["failed"]) == (4, 2, 2)
    assert result["duration_s"] == 2.0
    assert result["output_tokens_per_s"] == 3.0
    assert result["total_tokens_per_s"] == 9.0
    assert result["cached_tokens"] == 3
    assert result["ttft_p50_ms"] == pytest.approx(300)
    assert result["itl_p50_ms"] == pytest.approx(100)
    assert result["tpot_p50_ms"] == pytest.approx(150)
    assert result["e2e_p99_ms"] == pytest.approx(1000)
    assert result["slo_share"] == 0.25
    assert result["goodput_per_s"] == 0.5
    assert result["client_lag_max_ms"] == pytest.approx(1, abs=0.01)
    assert result["errors"] == {"429 busy": 1, "the stream held no output": 1}


def test_a_summary_of_nothing_has_no_latencies() -> None:
    assert summarise([])["ttft_p99_ms"] is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ("ttft=500ms", True),
        ("ttft=499ms", False),
        ("itl=300ms", True),
        ("itl=250ms", False),
        ("tpot=200ms", True),
        ("tpot=190ms", False),
        ("ttft=1s,e2e=0.9s", False),
    ],
)
def test_objectives(slo: str, good: bool) -> None:
    assert meets(observed(0.0, [0.5, 0.6, 0.9], 1.0), {k: v * 1.0001 for k, v in parse_slo(slo).items()}) is good


@pytest.mark.parametrize("text", ["ttfb=1s", "ttft", "ttft=", "ttft=1s,", "itl=fast"])
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


def drive(server: Served, calls: list[Call], due: list[float], **endpoint: Any) -> list[Observed]:
    return asyncio.run(run(Endpoint(server.url, **endpoint), calls, due))


def test_the_client_measures_a_server_whose_pace_is_known() -> None:
    with serve_parrot(step=0.02) as server:
        batch = calls_from_items(items([([40 + i, 41, 42], 12) for i in range(5)]))
        batch.append(Call(CHAT, {"messages": [{"role": "user", "content": "say [[some words]]"}]}))
        due = [0.0, 0.05, 0.1, 0.1, 0.1, 0.15]
        start = time.perf_counter()
        seen = drive(server, batch, due)
    assert [one.error for one in seen] == [None] * 6
    assert [one.output_tokens for one in seen[:5]] == [12] * 5
    assert all(one.prompt_tokens == 3 for one in seen[:5])
    assert seen[5].text == "some words"
    for one, offset in zip(seen, due):
        assert one.due == pytest.approx(seen[0].due + offset)
        assert one.sent >= one.due > start
    gaps = sorted(gap for one in seen for gap in one.gaps)
    assert gaps[len(gaps) // 2] == pytest.approx(0.02, rel=0.5)
    assert summarise(seen)["output_tokens"] >= 60


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """One place on the server and all requests due at once: all are sent at once, and the queue shows in TTFT."""
    with serve_parrot(step=0.01, max_running=1) as server:
        seen = drive(server, calls_from_items(items([([40], 10)] * 4)), [0.0] * 4)
    assert max(one.sent for one in seen) - min(one.sent for one in seen) < 0.1
    first = sorted(one.ttft for one in seen)
    assert first[-1] - first[0] >= 0.25


def test_refusals_are_counted_not_raised() -> None:
    with serve_parrot(step=0.01) as server:
        calls = [
            Call(COMPLETIONS, {"prompt": [40], "max_tokens": -1}),
            Call(COMPLETIONS, {"prompt": [40], "max_tokens": 3}),
        ]
        bad, good = drive(server, calls, [0.0, 0.0])
        assert bad.error is not None
        assert bad.error.startswith("400 ")
        assert "max_tokens" in bad.error
        assert good.error is None
        assert good.output_tokens == 3
        (unknown,) = drive(server, calls[1:], [0.0], model="nobody")
        assert unknown.error is not None
        assert unknown.error.startswith("404")


def test_a_closed_door_is_told_before_any_load() -> None:
    with serve_parrot(ServerConfig(api_key="secret")) as server:
        calls = calls_from_items(items([([40], 2)]))
        with pytest.raises(ConfigError, match="--api-key"):
            drive(server, calls, [0.0])
        assert drive(server, calls, [0.0], api_key="secret")[0].error is None
    with pytest.raises(ConfigError, match="no server answers"):
        drive(server, calls, [0.0])


def test_batch_files_are_sent_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write_requests(items([([1, 2], 3)]), path)
    (call,) = calls_from_file(path)
    assert call.path == COMPLETIONS
    assert call.body == {"prompt": [1, 2], "max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    for text in ("", "{", "[]", '{"url": "/v1/files", "body": {}}', '{"body": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError):
            calls_from_file(path)
