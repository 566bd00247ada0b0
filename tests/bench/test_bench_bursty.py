import json
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.bursty import Bursty, Served, schedule
from headrace.cli import main
from homes import fresh_home

SLOW = "throttled:20MB/s,write=2000MB/s:memory:16MiB"


def test_both_policies_serve_the_same_and_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(fresh_home(tmp_path)))
    picture = tmp_path / "curve.png"
    command = [
        "bench", "bursty", "--json", "--requests", "10", "--prefixes", "5", "--prefix-tokens", "256",
        "--suffix-tokens", "3", "--pool", "10MiB", "--load", "0.8", "--beyond", "1.2", "--tier", SLOW, "--tier", SLOW,
        "--plot", str(picture),
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["outputs_equal"] is True
    assert picture.stat().st_size > 0
    assert result["saturation_per_s"]["sequential"] > 0
    assert set(result["runs"]["ours"]) == {"0.8", "1.2"}
    run = result["runs"]["sequential"]["0.8"]
    assert run["backlog_most"] >= 1
    assert run["hit_tokens"]["memory"] > 0
    assert "memory-2" not in run["hit_tokens"]
    assert set(result["ttft_mean_ratio"]) == {"0.8"}


def test_arrivals_have_exactly_the_rate_and_one_shape() -> None:
    slow, fast = schedule(400, 2.0, 4.0, 1), schedule(400, 8.0, 4.0, 1)
    assert slow[0] == 0
    assert slow[200] == pytest.approx(200 / 2.0)
    assert np.diff(slow[:200]) == pytest.approx(np.diff(slow[200:]))
    assert np.std(np.diff(slow)) > 2 * np.mean(np.diff(slow))
    assert fast == pytest.approx([time / 4 for time in slow])


def served(p90: float) -> Served:
    return Served([0.0], [p90], [1], 1.0, {}, 0.0, 0.0, {})


def test_goodput_is_read_off_between_loads_and_never_beyond_them() -> None:
    sequential = {0.8: served(1.0), 0.5: served(0.1)}
    ours = {0.8: served(0.2), 1.2: served(0.6), 1.6: served(1.4)}
    result = Bursty({"sequential": 1.0, "ours": 2.0}, {"sequential": sequential, "ours": ours})
    assert result.goodput(0.8) == pytest.approx(1.4 / 0.8)
    assert result.goodput(0.5) == 0
    high = Bursty({"sequential": 1.0, "ours": 2.0}, {"sequential": {0.8: served(9.0)}, "ours": ours})
    assert high.goodput(0.8) == pytest.approx(2.0)
