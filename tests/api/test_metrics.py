"""What /metrics says, read by the official parser."""

import json
import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Served, serve_parrot

from headrace.api.logs import JsonFormatter
from headrace.core.config import ServerConfig


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
            assert sample.labels["model_name"]
    return found


def value(served: Served, name: str, **labels: str) -> float:
    with served.http() as http:
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(response.text)[f"headrace:{name}", tuple(sorted(labels.items()))]


def test_a_request_is_counted() -> None:
    with serve_parrot(step=0.002) as served, served.http() as http:
        body: dict[str, Any] = {"model": "parrot", "prompt": "[[abcde]]", "n": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json={**body, "stream": True}).status_code == 200
        assert http.post("/v1/completions", json={}).status_code == 400
        assert http.get("/nothing").status_code == 404
        assert value(served, "time_to_first_token_seconds_count") == 2
        assert value(served, "inter_token_latency_seconds_count") == 4 * 5
        assert value(served, "inter_token_latency_seconds_sum") > 20 * 0.001
        assert value(served, "e2e_request_latency_seconds_count") == 4
        assert value(served, "request_generation_tokens_sum") == 4 * 6
        assert value(served, "request_prompt_tokens_sum") == 2 * 9
        assert value(served, "request_success_total", finished_reason="stop") == 4
        assert value(served, "http_requests_total", handler="/v1/completions", status="200") == 2
        assert value(served, "http_requests_total", handler="/v1/completions", status="400") == 1
        assert value(served, "http_requests_total", handler="unknown", status="404") == 1
        assert value(served, "generation_tokens_total") == 4 * 6
        assert value(served, "prompt_tokens_total") == 4 * 9
        assert value(served, "num_requests_running") == 0
        assert value(served, "engine_up") == 1
        for name in ("num_preemptions_total", "prefix_cache_hits_total", "kv_cache_usage_perc", "num_requests_waiting"):
            assert value(served, name) >= 0


def test_request_logs_hold_numbers_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.api")
    with serve_parrot(ServerConfig(log_requests=True)) as served, served.http() as http:
        body = {"model": "parrot", "messages": [{"role": "user", "content": "[[secret]]"}]}
        http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "abc"})
        served.wait(lambda: any(record.getMessage() == "request" for record in caplog.records))
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    (line,) = [line for line in lines if line["message"] == "request"]
    assert line["request_id"] == "abc"
    assert (line["handler"], line["status"], line["finish"]) == ("/v1/chat/completions", 200, "stop")
    assert line["output_tokens"] == 7
    assert line["prompt_tokens"] > 10
    assert 0 <= line["ttft"] <= line["seconds"]
    assert "secret" not in json.dumps(lines)
