import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import MIN_STEP_TIMEOUT, Config, EngineConfig, SchedulerConfig, StoreConfig, check, option
from headrace.core.errors import ConfigError
from headrace.core.foreign import WAYS_OUT
from headrace.core.settings import (
    build,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    read_environment,
    read_file,
    resolve,
    settings_of,
    to_flags,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("4096", 4096), ("2GiB", 2 << 30), ("512 MB", 512_000_000), ("1.5kib", 1536), ("3g", 3_000_000_000)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.15s", 0.15), ("0", 0), ("150ms", 0.15), ("2m", 120), ("30s", 30), ("1h", 3600), ("50us", 5e-5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 2", "1XB", "nan"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number"):
        parse_size(text)
    with pytest.raises(ValueError, match="number"):
        parse_duration(text)


def test_a_duration_without_a_unit_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    said = "150 has no unit; write 150ms or 150s"
    with pytest.raises(ConfigError, match=said):
        resolve(Config, {"itl_target": "150"}, environ={})
    with pytest.raises(ConfigError, match=said):
        resolve(Config, {}, environ={"HEADRACE_ITL_TARGET": "150"})
    for text in ("150", "150.0", '"150"'):
        file = tmp_path / "h.toml"
        file.write_text(f"itl_target = {text}")
        with pytest.raises(ConfigError, match=said):
            resolve(Config, {}, file=file, environ={})


@pytest.mark.parametrize("name", WAYS_OUT)
def test_vllms_names_are_not_ours_and_are_told_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(WAYS_OUT[name])):
        read_environment(Config, {f"HEADRACE_{name.upper()}": "1"})
    file = tmp_path / "h.toml"
    file.write_text(f"{name} = 1")
    with pytest.raises(ConfigError, match=re.escape(WAYS_OUT[name])):
        read_file(Config, file)
    flags = {flag for s in settings_of(Config) for flag in (s.flag, s.flag.replace("--", "--no-", 1))}
    assert set(re.findall(r"--[a-z-]+", WAYS_OUT[name])) <= flags


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_queue", "pipeline_depth"])
def test_numbers_that_cannot_work_are_named_by_their_flag(name: str) -> None:
    check(EngineConfig())
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} must be at least 1, got 0$"):
        check(EngineConfig(scheduler=replace(SchedulerConfig(), **{name: 0})))


@pytest.mark.parametrize(("name", "value"), [("max_num_seqs", 1 << 40), ("max_num_batched_tokens", 1 << 40)])
def test_slips_of_the_finger_are_named_by_their_flag(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} must be at most"):
        check(EngineConfig(scheduler=replace(SchedulerConfig(), **{name: value})))


def test_a_step_may_not_be_given_too_little_time() -> None:
    for seconds in (0.0, MIN_STEP_TIMEOUT):
        check(EngineConfig(scheduler=SchedulerConfig(step_timeout=seconds)))
    with pytest.raises(ConfigError, match="--step-timeout must be 0"):
        check(EngineConfig(scheduler=SchedulerConfig(step_timeout=1.0)))


@given(st.integers(0, 1 << 45), st.integers(0, 10**6))
def test_shown_quantities_read_back(count: int, milliseconds: int) -> None:
    assert parse_size(format_size(count)) == count
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, rel=1e-5)


def test_every_leaf_of_the_configuration_has_a_flag_a_variable_and_help() -> None:
    settings = {setting.name: setting for setting in settings_of(Config)}
    assert settings["max_model_len"].flag == "--max-model-len"
    assert settings["max_model_len"].env == "HEADRACE_MAX_MODEL_LEN"
    assert settings["kv_memory"].unit == "bytes"
    assert settings["itl_target"].unit == "seconds"
    assert settings["api_key"].optional
    assert all(setting.help for setting in settings.values())


@pytest.mark.parametrize("setting", settings_of(Config), ids=lambda setting: setting.name)
def test_each_default_survives_being_written_and_read(setting) -> None:  # type: ignore[no-untyped-def]
    if setting.default is not None and setting.show(setting.default):
        assert setting.parse(setting.show(setting.default), setting.flag) == setting.default


def test_defaults_without_any_source() -> None:
    assert resolve(Config, {}, environ={}) == Config()
    assert build(EngineConfig, {}) == EngineConfig()


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text('max-num-seqs = 1\nport = 1\npage_size = 32\n[engine.cache]\nkv_memory = "1GiB"\n')
    environ = {"HEADRACE_MAX_NUM_SEQS": "2", "HEADRACE_PORT": "2", "HEADRACE_HOME": "/x", "HOME": "/y"}
    config = resolve(Config, {"max_num_seqs": "3", "prefix_caching": False, "model": None}, file=file, environ=environ)
    assert config.engine.scheduler.max_num_seqs == 3
    assert config.server.port == 2
    assert config.engine.cache.page_size == 32
    assert config.engine.cache.kv_memory == 1 << 30
    assert config.engine.cache.prefix_caching is False
    assert config.engine.model.model == "default"


def test_a_configuration_becomes_the_flags_that_make_it() -> None:
    flags = {"max_model_len": "4096", "kv_memory": "2GiB", "itl_target": "150ms", "prefix_caching": False}
    config = resolve(Config, flags, environ={})
    arguments = to_flags(config)
    assert arguments == [
        "--max-model-len", "4096", "--kv-memory", "2GiB", "--no-prefix-caching", "--itl-target", "150ms",
    ]  # fmt: skip
    assert to_flags(Config()) == []


def test_a_part_of_the_tree_passes_over_the_other_parts_but_checks_them(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text("[server]\nport = 99\n[engine.model]\nthreads = 2\n")
    engine = resolve(EngineConfig, {}, root=Config, file=file, environ={"HEADRACE_HOST": "::1"})
    assert engine.model.threads == 2
    with pytest.raises(ConfigError, match="HEADRACE_PORT"):
        resolve(EngineConfig, {}, root=Config, environ={"HEADRACE_PORT": "http"})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("HEADRACE_MAX_MODEL_LENGTH", "1", r"did you mean HEADRACE_MAX_MODEL_LEN\?"),
        ("HEADRACE_HOM", "/x", r"did you mean HEADRACE_HOME\?"),
        ("HEADRACE_XYZZY", "1", "unknown environment variable HEADRACE_XYZZY$"),
        ("HEADRACE_PAGE_SIZE", "17", "17 is not one of 8, 16, 32, 64"),
        ("HEADRACE_KV_MEMORY", "lots", "'lots' is not a size such as 2GiB"),
        ("HEADRACE_ITL_TARGET", "1 day", "a duration such as 150ms"),
        ("HEADRACE_PREFIX_CACHING", "maybe", "true or false"),
        ("HEADRACE_PORT", "-1", "at least 0"),
        ("HEADRACE_THREADS", "two", "a whole number"),
    ],
)
def test_wrong_variables_are_named_with_the_way_out(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_environment(Config, {variable: text})
    assert variable in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_empty_variable_is_unset() -> None:
    assert read_environment(Config, {"HEADRACE_PORT": ""}) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_sequences = 2", r"unknown key 'max_num_sequences' .*did you mean max_num_seqs\?"),
        ("[engine.cash]\nkv_memory = 1", r"unknown key 'engine.cash' .*did you mean cache\?"),
        ("[engine.cache]\nport = 1", "unknown key 'engine.cache.port'"),
        ("port = 'x'", "'x' is not a whole number"),
        ("port = true", "True is not a whole number"),
        ("model = 3", "3 is not text"),
        ("port = 1\n[server]\nport = 2", "stands twice"),
        ("port = ", "is not TOML"),
        ("itl_target = nan", "finite"),
    ],
)
def test_wrong_files_are_named_with_the_way_out(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_file(Config, file)
    assert "h.toml" in str(raised.value)


def test_numbers_of_a_file_need_no_quotes(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text("itl_target = 0\nkv_memory = 4096\nlog_requests = true")
    expected = {"itl_target": 0.0, "kv_memory": 4096, "log_requests": True}
    assert read_file(Config, file) == expected
    with pytest.raises(ConfigError, match="cannot read"):
        read_file(Config, tmp_path / "missing.toml")


def test_a_tree_that_cannot_become_flags_is_refused() -> None:
    @dataclass(frozen=True)
    class Part:
        port: int = option(1, "a port")

    @dataclass(frozen=True)
    class Twice:
        one: Part = field(default_factory=Part)
        port: int = option(2, "again")

    @dataclass(frozen=True)
    class Listed:
        many: list[int] = field(default_factory=list, metadata={"help": "several"})

    with pytest.raises(TypeError, match="two fields"):
        settings_of(Twice)
    with pytest.raises(TypeError, match="flags can be"):
        settings_of(Listed)


TIERS = ("memory:4GiB", "dir:/mnt/nvme:100GiB:cluster")


def test_a_setting_that_repeats_comes_from_flags_a_variable_or_a_list(tmp_path: Path) -> None:
    assert resolve(Config, {"tier": list(TIERS)}, environ={}).engine.store.tier == TIERS
    assert resolve(Config, {"tier": ["dir:/a b,c:1GiB"]}, environ={}).engine.store.tier == ("dir:/a b,c:1GiB",)
    for text in (",".join(TIERS), " ".join(TIERS), " , ".join(TIERS) + ","):
        assert resolve(Config, {"tier": []}, environ={"HEADRACE_TIER": text}).engine.store.tier == TIERS
    file = tmp_path / "h.toml"
    file.write_text(f"tier = {list(TIERS)}\n[engine.store]\nstore_ttl = '2d'\nstore = false")
    store = resolve(Config, {}, file=file, environ={}).engine.store
    assert (store.tier, store.store_ttl, store.store) == (TIERS, 2 * 86400, False)
    file.write_text("tier = 'memory:1GiB,dir:/x:1GiB'")
    assert resolve(Config, {}, file=file, environ={}).engine.store.tier == ("memory:1GiB", "dir:/x:1GiB")
    for wrong in ("3", "[3]", "['']"):
        file.write_text(f"tier = {wrong}")
        with pytest.raises(ConfigError, match="is not a list of texts"):
            resolve(Config, {}, file=file, environ={})


def test_a_setting_that_repeats_becomes_flags_again() -> None:
    config = build(Config, {"tier": TIERS, "store": False})
    assert to_flags(config) == ["--no-store", "--tier", TIERS[0], "--tier", TIERS[1]]


@pytest.mark.parametrize("chunk", [0, 8, 100])
def test_a_chunk_is_whole_pages(chunk: int) -> None:
    with pytest.raises(ConfigError, match=rf"--chunk-tokens must be a multiple of --page-size \(16\), got {chunk}"):
        check(EngineConfig(store=StoreConfig(chunk_tokens=chunk)))
