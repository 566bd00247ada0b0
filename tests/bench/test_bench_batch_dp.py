"""A job on several engines: every arm answers everything, and the quota is set and taken back."""

import os
from pathlib import Path

import numpy as np
import pytest

from headrace.bench import batch_dp, batch_mixes
from headrace.bench.batch_mixes import Mix, make_job, several
from headrace.bench.cpu_quota import cpu_quota
from headrace.bench.local_engine import with_cache
from headrace.core.config import EngineConfig, ModelConfig, StoreConfig
from headrace.core.errors import ConfigError
from homes import fresh_home

SMALL = Mix(3, 4, (40, 60), (3, 6), (1, 3), 12, (4, 8), (4, 8))


def test_several_jobs_are_one() -> None:
    jobs = [make_job("even", seed) for seed in range(2)]
    both = several(jobs)
    assert len(both.items) == len(both.requests) == sum(len(job.items) for job in jobs)
    assert len({item.custom_id for item in both.items}) == len(both.items)
    assert both.lengths == [length for job in jobs for length in job.lengths]
    for number in (0, len(jobs[0].items), len(both.items) - 1):
        assert both.requests.prompt(number).tolist() == list(both.items[number].prompt)
    assert np.diff(both.requests.offsets).min() > 0


def test_a_quota_goes_into_files_and_is_taken_back(tmp_path: Path) -> None:
    """A folder in place of the mount: what is written is seen; a real group vanishes with its files."""
    quota = cpu_quota(os.getpid(), 0.5, tmp_path)
    quota.__enter__()
    written = {file.name: file.read_text() for file in next(tmp_path.glob("headrace-quota-*")).iterdir()}
    with pytest.raises(OSError, match="not empty"):
        quota.__exit__(None, None, None)
    assert written == {"cpu.max": "5000 10000", "cgroup.procs": str(os.getpid())}


def test_where_no_group_can_be_made_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="root"), cpu_quota(os.getpid(), 0.5, tmp_path / "nowhere"):
        pass


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores")
def test_every_arm_runs_the_whole_job(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(fresh_home(tmp_path)))
    monkeypatch.setitem(batch_mixes.MIXES, "small", SMALL)
    try:
        with cpu_quota(os.getpid(), 1.0):
            pass
    except ConfigError:
        monkeypatch.setattr(batch_dp, "ARMS", {name: (chosen, 1.0) for name, (chosen, _) in batch_dp.ARMS.items()})
    config = EngineConfig(model=ModelConfig(model=str(tiny)), store=StoreConfig(store=False))
    result = batch_dp.measure(with_cache(config, kv_memory=1 << 20), make_job("small", vocab_size=300), "blend", 1)
    assert set(result["each_s"]) == {"one", "two", "slow", "one and slow"}
    assert all(result[key] > 0 for key in ("one_s", "two_s", "dp2_speedup", "share_of_sum_with_one_slowed"))
