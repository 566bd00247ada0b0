"""The engine over the real store: memory and disk, faults, restarts, and what must never be shared."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_world import config, drain, engine, request, tokens

from headrace.bench.tiny_models import save
from headrace.core.config import EngineConfig, ModelConfig, StoreConfig
from headrace.core.errors import ConfigError
from headrace.core.request import Request
from headrace.engine.build import EngineParts, build
from headrace.engine.core import Engine
from headrace.store.layout import KVLayout
from headrace.store.opening import OpenedStore, open_store
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.faulty import Fault, FaultPlan, FaultyTier
from headrace.store.tiers.spec import build_tiers

CHUNK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=4)


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def work(count: int = 10, seed: int = 3) -> list[Request]:
    rng = random.Random(seed)
    documents = [prompt(90, document) for document in range(2)]
    made = []
    for i in range(count):
        text = documents[i % 2][: rng.randrange(90)] + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 40))]
        made.append(request(f"r{i}", text, rng.randrange(1, 40)))
    return made


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[int]]:
    running, _ = engine(config(model, caching=False, max_num_batched_tokens=512))
    found: dict[str, list[int]] = {}
    for item in work():
        found |= tokens(drain(running, [item]))
    return found


Start = Callable[..., tuple[Engine, EngineParts]]


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    """Starts engines over tiers and closes them; every part of a prompt goes to every tier."""
    running: list[tuple[Engine, EngineParts]] = []

    def started(*tiers: str, path: Path = model, **options: object) -> tuple[Engine, EngineParts]:
        opened = options.pop("opened", None)
        store = StoreConfig(tier=tiers, chunk_tokens=CHUNK, replication="all")
        settings = config(path, store=store, **options)  # type: ignore[arg-type]
        made = engine(settings, **({"opened": opened} if opened else {}))  # type: ignore[arg-type]
        running.append(made)
        return made

    yield started
    for one, parts in running:
        assert one.close(20)
        one.check()
        assert parts.group.allocator.used == 0


def stop(running: Engine, parts: EngineParts) -> None:
    """End as a worker does; nothing is held any more."""
    assert running.close(20)
    running.check()
    assert parts.group.allocator.used == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_cold_warm_and_after_a_restart_over_memory_and_disk(
    tmp_path: Path, start: Start, alone: dict[str, list[int]], depth: int
) -> None:
    tiers = ("memory:64MiB", f"dir:{tmp_path / 'store'}:64MiB")
    running, parts = start(*tiers, pipeline_depth=depth)
    assert tokens(drain(running, work())) == alone
    stop(running, parts)
    again, parts = start(*tiers, pipeline_depth=depth)
    deltas = drain(again, work())
    assert tokens(deltas) == alone
    stats = again.stats()
    assert stats.loads_total > 0
    assert stats.loads_failed_total == 0
    assert set(stats.hit_tokens_by_source) <= {"pool", *stats.store_tiers}
    assert sum(stats.hit_tokens_by_source.values()) == stats.hit_tokens_total
    assert again.info.store.startswith("memory")


@pytest.mark.parametrize("family", ["mistral", "gemma2", "opt", "qwen3", "qwen3-moe"])
def test_families_with_windows_caps_and_experts_come_back_right(tmp_path: Path, start: Start, family: str) -> None:
    path = save(family, tmp_path / "model")
    text = prompt(5 * CHUNK + 7)  # longer than the sliding window of 40
    tier = f"dir:{tmp_path / 'store'}:64MiB"
    plain, _ = engine(config(path, caching=False))
    wanted = tokens(drain(plain, [request("a", text, 24)]))
    first, parts = start(tier, path=path)
    assert tokens(drain(first, [request("a", text, 24)])) == wanted
    stop(first, parts)
    again, parts = start(tier, path=path)
    deltas = drain(again, [request("a", text, 24)])
    assert tokens(deltas) == wanted
    assert deltas["a"][0].cached_tokens == 5 * CHUNK


def faulty(folder: Path, plan: FaultPlan, made: list[FaultyTier]) -> Callable[[StoreConfig, KVLayout], OpenedStore]:
    """Opens a store of two faulty tiers on disk."""

    def opened(settings: StoreConfig, layout: KVLayout) -> OpenedStore:
        inner = build_tiers([f"dir:{folder / name}:64MiB" for name in ("a", "b")], folder)
        made[:] = [FaultyTier(tier, plan) for tier in inner]
        return OpenedStore(KVStore(layout, made, StoreSettings.of(settings)), "two faulty ones")

    return opened


@pytest.mark.parametrize(
    "fault", [Fault.FLIPPED_BIT, Fault.READ_ERROR, Fault.SHORT_READ, Fault.MISSING, Fault.WRITE_ERROR, Fault.SEAL_ERROR]
)
def test_faults_of_tiers_change_no_token(
    tmp_path: Path, start: Start, alone: dict[str, list[int]], fault: Fault
) -> None:
    made: list[FaultyTier] = []
    struck = 0
    for _ in range(3):
        running, parts = start(opened=faulty(tmp_path, FaultPlan(seed=5, rates={fault: 0.3}), made), kv_bytes=1 << 20)
        assert tokens(drain(running, work())) == alone
        assert running.stats().requests_total == {"length": 10}
        stop(running, parts)
        struck += sum(tier.injected[fault] for tier in made)
    assert struck > 0


def test_the_folder_may_go_away_under_load(tmp_path: Path, start: Start, alone: dict[str, list[int]]) -> None:
    folder = tmp_path / "store"
    tier = f"dir:{folder}:64MiB"
    running, parts = start(tier)
    assert tokens(drain(running, work())) == alone
    stop(running, parts)
    again, parts = start(tier)
    for item in work():
        again.add(item)
    out: dict[str, list[int]] = {}
    steps = 0
    while not again.idle:
        steps += 1
        if steps == 2:
            shutil.rmtree(folder)
        for delta in again.step():
            out.setdefault(delta.request, []).extend(delta.tokens)
        again.check()
    assert out == alone


def test_salts_dtypes_and_models_never_share(tmp_path: Path, start: Start, model: Path) -> None:
    tier = f"dir:{tmp_path / 'store'}:64MiB"
    text = prompt(4 * CHUNK + 3)
    tuned = save("llama", tmp_path / "tuned", num_hidden_layers=4)
    _change_one_tensor(tuned)

    def cached(**options: object) -> int:
        salt = options.pop("salt", "")
        running, parts = start(tier, **options)
        count = drain(running, [request("a", text, 2, cache_salt=salt)])["a"][0].cached_tokens
        stop(running, parts)
        return count

    assert cached() == 0
    assert cached() == 4 * CHUNK
    assert cached(salt="mine") == 0
    assert cached(salt="mine") == 4 * CHUNK
    assert cached(salt="yours") == 0
    assert cached(dtype="bfloat16") == 0
    assert cached(dtype="bfloat16") == 4 * CHUNK
    assert cached(path=tuned) == 0
    assert cached(path=tuned) == 4 * CHUNK
    assert cached(page_size=16) == 4 * CHUNK  # how the pool lays pages out is nobody else's business


def _change_one_tensor(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    with torch.no_grad():
        weights[name][0, 0] += 1.0
    save_file(weights, file, metadata={"format": "pt"})


def test_two_engines_on_one_folder_read_what_the_other_wrote(tmp_path: Path, start: Start) -> None:
    tier = f"dir:{tmp_path / 'store'}:64MiB"
    stores: list[KVStore] = []

    def opened(settings: StoreConfig, layout: KVLayout) -> OpenedStore | None:
        found = open_store(settings, layout)
        assert found is not None
        stores.append(found.store)
        return found

    one, _ = start(tier, opened=opened)
    two, _ = start(tier)
    text = prompt(4 * CHUNK + 3)
    wanted = tokens(drain(one, [request("a", text, 4)]))
    assert stores[0].flush(20)
    deltas = drain(two, [request("a", text, 4)])
    assert tokens(deltas) == wanted
    assert deltas["a"][0].cached_tokens == 4 * CHUNK


def test_a_closed_engine_goes_on_without_a_store(tmp_path: Path, start: Start) -> None:
    running, parts = start(f"dir:{tmp_path / 'store'}:64MiB")
    text = prompt(4 * CHUNK + 3)
    wanted = tokens(drain(running, [request("a", text, 4)]))
    stop(running, parts)
    assert tokens(drain(running, [request("a", text, 4)])) == wanted
    assert running.close()


def test_a_cold_prefix_asked_for_by_many_at_once_is_computed_once_and_lies_once_on_each_tier(
    tmp_path: Path, start: Start
) -> None:
    text = prompt(3000)
    asked = [request(f"r{i}", [*text, 5 + i], 3) for i in range(16)]
    tiers = [f"dir:{tmp_path / name}:64MiB" for name in ("one", "other")]
    running, parts = start(*tiers, max_num_batched_tokens=512, kv_bytes=8 << 20)
    drain(running, asked)
    stats = running.stats()
    # Of each request also its last token and what it generates is computed.
    assert stats.computed_tokens_total <= 1.1 * 3000 + 16 * (CHUNK + 3)
    stop(running, parts)
    again, _ = start(*tiers)
    for tier in again.stats().store_tiers.values():
        assert tier["parts"] == 3000 // CHUNK


def test_a_wrong_tier_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    model = ModelConfig(model=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="unknown tier '/mnt/nvme'"):
        build(EngineConfig(model=model, store=StoreConfig(tier=("/mnt/nvme",))))
