import json
import math
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.ratio import ratio_of, t_quantile
from headrace.bench.reuse import PREFIX, requests, shared_share
from headrace.cli import main
from headrace.core.errors import ConfigError
from homes import fresh_home


def test_engines_in_turn_compute_the_same_and_write_what_they_say(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(fresh_home(tmp_path / "home")))
    command = [
        "bench", "reuse", str(tiny), "--json", "--kv-memory", "8MiB", "--page-size", "16", "--chunk-tokens", "64",
        "--warm", "6", "--pairs", "2", "--block", "4", "--share", "0.2", "--shortest", "600", "--longest", "900",
        "--outputs", "2", "--vocab-size", "512",
        "--tier", "memory:32MiB", "--tier", f"dir:{tmp_path / 'tier'}:64MiB",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["outputs_equal"] is True
    assert result["reuse_share"] > 0.1
    assert set(result["hit_share"]) == {"off", "one", "auto"}
    assert result["written_bytes"]["off"] == 0
    assert result["written_bytes"]["one"] > 0
    assert result["write_amplification"]["one"] == 1
    for name in ("auto_ttft_over_off", "auto_ttft_over_one", "one_wall_over_off", "auto_cpu_over_off_interval"):
        mean, low, high = result[name]
        assert low <= mean <= high
    assert list((tmp_path / "tier").iterdir()) == []


def test_the_share_of_old_tokens_is_what_was_asked_for() -> None:
    batch = requests(400, 0.04, 256, 1500, 4)
    lengths = [len(item.prompt) for item in batch]
    assert min(lengths) >= 256
    assert max(lengths) <= 1500
    assert shared_share(batch[200:], batch[:200]) == pytest.approx(0.04, abs=0.01)
    assert shared_share(requests(50, 0.0, 256, 1500, 4), []) == 0
    assert len({item.custom_id for item in batch}) == 400
    head = batch[0].prompt[:PREFIX]
    twice = [batch[0], batch[0]]
    if len(head) == PREFIX:
        assert shared_share(twice, []) == pytest.approx(PREFIX / (2 * len(batch[0].prompt)))


def test_ratios_of_pairs_cancel_what_hits_both() -> None:
    noise = np.exp(np.random.default_rng(0).normal(0, 0.5, 12))
    exact = ratio_of([1.1 * x for x in noise], list(noise))
    assert exact == pytest.approx((1.1, 1.1, 1.1))
    loose = ratio_of([1.0, 1.2, 1.1], [1.0, 1.0, 1.0])
    assert loose.low < 1.0 < loose.mean < 1.2 < loose.high
    assert ratio_of([2.0], [1.0]).high == math.inf
    with pytest.raises(ConfigError, match="no pairs"):
        ratio_of([], [])


@pytest.mark.parametrize(("freedom", "value"), [(4, 2.7764), (8, 2.3060), (11, 2.2010), (30, 2.0423)])
def test_quantiles_of_t_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, rel=2e-3)
