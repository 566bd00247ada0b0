import json
from pathlib import Path

import pytest

from headrace.bench.store import Workload, measure, read
from headrace.bench.store_chunks import chunk_bytes, scratch_tiers, write_chunks
from headrace.cli import main
from headrace.core.errors import ConfigError
from headrace.store.layout import KVLayout

LAYOUT = KVLayout("be" * 32, layers=4, kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=64)
RECORD = LAYOUT.record_bytes(2, 64)
FAST, SLOW = "throttled:16MB/s:memory:4MiB", "throttled:8MB/s@200ms,2MB/s@100ms:memory:4MiB"


def test_tiers_together_give_more_than_the_best_alone_and_less_than_their_sum() -> None:
    with scratch_tiers([FAST, SLOW]) as tiers:
        work = Workload(LAYOUT, write_chunks(tiers, LAYOUT, 16), requests=8, unit_bytes=RECORD)
        result = measure(tiers, work, ["completion", "sequential", "static"], rounds=1)
    summary = result.summary()
    total = 8 * 16 * 4 * RECORD
    for runs in result.together.values():
        assert sum(runs[0].by_tier) == total
        assert runs[0].units == 8 * 16 * 4
        assert runs[0].rate * runs[0].seconds == pytest.approx(total)
    shares = {name: one["share_of_sum"] for name, one in summary["policies"].items()}
    # Bounds that hold on a busy machine: nobody gets more than there is, and the order of the policies.
    assert shares["completion"] > max(shares["sequential"], shares["static"])
    assert 0.5 < shares["completion"] <= 1.02
    assert summary["share_of_sum"] == shares["completion"]
    assert result.together["sequential"][0].by_tier[1] == 0
    assert result.together["static"][0].by_tier[0] == total // 2
    first, second = summary["tiers"]
    assert first["capacity_gb_per_s"] == pytest.approx(0.016)
    assert 0.005 < second["capacity_gb_per_s"] < 0.007
    assert first["alone_gb_per_s"] <= 0.0163
    assert summary["total_gb_per_s"] == pytest.approx(
        first["together_gb_per_s"] + second["together_gb_per_s"], abs=2e-4
    )
    assert summary["step_cost_ms"] > 0


def test_scratch_tiers_leave_nothing_and_touch_nothing(tmp_path: Path) -> None:
    mine = tmp_path / "headrace-kv"
    mine.mkdir()
    before = set(Path("/dev/shm").glob("headrace-*/*"))
    with scratch_tiers([f"dir:{tmp_path}:4MiB", "memory:4MiB"]) as tiers:
        work = Workload(LAYOUT, write_chunks(tiers, LAYOUT, 3), requests=1)
        run = read(tiers, work, "completion")
        assert sum(run.by_tier) == 3 * 4 * RECORD
        assert run.capacity == (None, None)
        assert list(mine.iterdir()) == []
    assert list(tmp_path.iterdir()) == [mine]
    assert set(Path("/dev/shm").glob("headrace-*/*")) <= before


def test_too_many_chunks_for_a_tier_are_refused() -> None:
    count = (4 << 20) // chunk_bytes(LAYOUT) + 1
    with scratch_tiers(["memory:4MiB"]) as tiers, pytest.raises(ConfigError, match="fewer --chunks"):
        write_chunks(tiers, LAYOUT, count)


SMALL = ["--chunks", "4", "--requests", "2", "--layers", "4", "--kv-heads", "1", "--head-dim", "16", "--rounds", "1"]


def test_the_command_compares_a_disk_with_memory_as_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "reads.png"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "store", "--disk", str(tmp_path / "disk"), *SMALL, "--plot", str(picture), "--json"])
    assert ended.value.code in (0, None)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"share_of_sum", "total_gb_per_s", "tiers", "step_cost_ms"} <= set(result)
    assert [tier["name"].split(":")[0] for tier in result["tiers"]] == ["dir", "memory"]
    assert picture.stat().st_size > 1000
    assert list((tmp_path / "disk").iterdir()) == []


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "store", "--tier", "memory:64MiB", "--policy", "static", "--policy", "completion", *SMALL])
    assert ended.value.code in (0, None)
    out = capsys.readouterr().out
    assert all(word in out for word in ("static", "completion", "memory", "share of the sum"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "best"], "'best' is not one of completion, static, sequential"),
        (["--disk", "/tmp", "--tier", "memory:1GiB"], "exclude each other"),
        (["--unit-size", "1 furlong"], "--unit-size"),
        (["--tier", "memory:1MiB"], "fewer --chunks"),
    ],
)
def test_wrong_options_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "store", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
