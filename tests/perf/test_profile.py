import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perf_examples import profile

from headrace.core.errors import ConfigError
from headrace.perf.presets import NANOFLOW_OVERLAP, accelerator, as_run, estimate
from headrace.perf.profile import available_cores, load, load_or_default, monotone_gemm, path_of, save


def test_rate_at_and_between_points() -> None:
    p = profile()
    assert p.gemm_rate(64) == 80e9
    assert p.gemm_rate(1) == 10e9
    assert p.gemm_rate(5000) == 140e9
    # Times 64/80e9 and 512/100e9; half way in rows is half way in time.
    middle = (64 / 80e9 + 512 / 100e9) / 2
    assert p.gemm_rate(288) == pytest.approx(288 / middle)


def test_best_rate_looks_at_no_more_than_the_given_rows() -> None:
    assert profile().best_gemm_rate(512) == 100e9
    assert profile().best_gemm_rate(2048) == 140e9
    with pytest.raises(ConfigError, match="8 rows or fewer"):
        profile(gemm=((64, 1e9),)).best_gemm_rate(8)


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e6, 1e12)), min_size=1, unique_by=lambda p: p[0]))
def test_a_measured_table_becomes_one_where_more_rows_never_take_less_time(points: list[tuple[int, float]]) -> None:
    p = profile(gemm=monotone_gemm(points))  # the constructor refuses tables that are not monotone
    assert [rows for rows, _ in p.gemm] == sorted(rows for rows, _ in points)
    times = [rows / p.gemm_rate(rows) for rows in range(1, 300)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gemm", ()),
        ("gemm", ((0, 1e9),)),
        ("gemm", ((8, 1e9), (8, 1e9))),
        ("gemm", ((8, 1e9), (16, 3e9))),
        ("gemm", ((8, -1.0),)),
        ("kv_read", 0.0),
        ("attention", float("nan")),
        ("copy", float("inf")),
        ("step_overhead", -1.0),
        ("layer_overhead", 100.0),
    ],
)
def test_impossible_numbers_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        profile(**{field: value})


def test_saved_and_loaded_profiles_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    path = save(profile())
    assert path == path_of("cpu", 2, "float32")
    assert load(path) == profile()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_profile_is_used_only_for_the_device_it_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    save(profile())
    assert load_or_default("cpu", 2, "float32", "Test CPU") == profile()
    assert not load_or_default("cpu", 2, "float32", "Another CPU").measured
    assert not load_or_default("cpu", 1, "float32", "Test CPU").measured
    assert load_or_default("cpu", 0, "float32").threads == available_cores()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("gemm"),
        lambda d: d.update(format=99),
        lambda d: d.update(colour="red"),
        lambda d: d.update(kv_read="fast"),
        lambda d: d.update(kv_read=-1),
    ],
)
def test_a_broken_profile_is_named_with_the_way_out(change, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = save(profile(), tmp_path / "p.json")
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError):
        load(path)
    path.write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="bench calibrate"):
        load(path)


def test_estimates_exist_for_every_dtype_and_thread_count() -> None:
    for threads in (1, 2, 3, 16, 128):
        for dtype in ("float32", "bfloat16", "float16"):
            assert estimate("cpu", "any", threads, threads, dtype).gemm
    with pytest.raises(ConfigError, match="int4"):
        estimate("cpu", "any", 2, 2, "int4")
    assert estimate("cuda", "NVIDIA H200", 132, 0, "bfloat16").device_name == "H200"
    h200 = accelerator("H200")
    assert h200.gemm_rate(8192) == pytest.approx(989e12 * 0.6)
    assert h200.gemm_rate(1) == pytest.approx(4.8e12 * 0.8)  # 2 FLOPs per 2 bytes: bound by memory
    with pytest.raises(ConfigError, match="TPU"):
        accelerator("TPU")


def test_a_device_overlaps_what_its_engine_does() -> None:
    preset, measured = accelerator("A100"), profile(device="cuda")
    own = replace(measured, overlap=((0.5, 0.9),))
    assert as_run(preset, False).overlap == as_run(own, False).overlap == ()
    assert as_run(preset, True).overlap == as_run(measured, True).overlap == NANOFLOW_OVERLAP
    assert as_run(own, True) == own
