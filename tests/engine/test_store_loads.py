"""Stored prefixes in the engine: whatever came from the store, the same tokens; what did not come is computed."""

import random
from pathlib import Path

import pytest
from engine_world import ThreadSpan, config, drain, engine, request, tokens
from store_world import MemoryStore

from headrace.bench.tiny_models import save
from headrace.core.config import StoreConfig
from headrace.core.request import Request
from headrace.engine.build import EngineParts
from headrace.engine.core import Engine
from headrace.engine.pipeline import LocalSpan

CHUNK = 16
LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS)


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def with_store(model: Path, store: MemoryStore, **options: object) -> tuple[Engine, EngineParts]:
    spans = options.pop("spans", None)
    settings = config(model, store=StoreConfig(chunk_tokens=CHUNK), **options)  # type: ignore[arg-type]
    return engine(settings, opened=store.open, spans=spans)  # type: ignore[arg-type]


def finish(running: Engine, parts: EngineParts, store: MemoryStore) -> None:
    """All saves done, nothing held: the leak check at the end of every test."""
    store.settle()
    running.step()
    running.check()
    assert parts.group.allocator.used == 0
    assert not store.leases


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
    """Each request on its own, without any cache."""
    running, _ = engine(config(model, caching=False, max_num_batched_tokens=512))
    found: dict[str, list[int]] = {}
    for item in work():
        found |= tokens(drain(running, [item]))
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [24, 512])
def test_cold_warm_and_after_a_restart_the_tokens_are_the_same(
    model: Path, alone: dict[str, list[int]], depth: int, budget: int
) -> None:
    store = MemoryStore()
    running, parts = with_store(model, store, pipeline_depth=depth, max_num_batched_tokens=budget)
    assert tokens(drain(running, work())) == alone
    assert tokens(drain(running, work())) == alone
    finish(running, parts, store)
    assert store.parts
    again = MemoryStore(store.parts, unit_layers=2)
    restarted, new = with_store(model, again, pipeline_depth=depth, max_num_batched_tokens=budget)
    deltas = drain(restarted, work())
    assert tokens(deltas) == alone
    stats = restarted.stats()
    assert stats.hit_tokens_by_source["near"] > 0
    assert stats.hit_tokens_by_source["far"] > 0
    assert sum(stats.hit_tokens_by_source.values()) == stats.hit_tokens_total
    assert stats.hit_tokens_total == sum(parts[0].cached_tokens for parts in deltas.values())
    for parts_of in deltas.values():
        assert sum((parts_of[0].cached_by_source or {}).values()) == parts_of[0].cached_tokens
    assert stats.loads_total == sum(again.batches)
    finish(restarted, new, again)


@pytest.mark.parametrize("length", [4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1])
def test_at_chunk_edges_at_least_one_token_is_computed(model: Path, length: int) -> None:
    text = prompt(length)
    store = MemoryStore()
    first, parts = with_store(model, store)
    wanted = tokens(drain(first, [request("a", text, 3 * CHUNK)]))["a"]
    finish(first, parts, store)
    again = MemoryStore(store.parts)
    running, parts = with_store(model, again)
    deltas = drain(running, [request("a", text, 3 * CHUNK)])
    assert tokens(deltas)["a"] == wanted
    cached = (length - 1) // CHUNK * CHUNK
    assert deltas["a"][0].cached_tokens == cached
    stats = running.stats()
    assert (stats.prompt_tokens_total, stats.hit_tokens_total) == (length, cached)
    assert stats.computed_tokens_total == length - cached + 3 * CHUNK - 1
    finish(running, parts, again)


def test_prompt_and_generated_tokens_are_saved_once_each(model: Path) -> None:
    store = MemoryStore()
    running, parts = with_store(model, store)
    text = prompt(3 * CHUNK + 5)
    out = tokens(drain(running, [request("a", text, 2 * CHUNK)]))["a"]
    finish(running, parts, store)
    assert [spec.chunk for spec in store.specs] == [0, 1, 2, 3, 4]  # the last token's KV is never computed
    assert len(store.parts) == 5
    assert [spec.parent for spec in store.specs] == [None, *(spec.part.key for spec in store.specs[:-1])]
    assert all(spec.weight > 0 for spec in store.specs)
    prefill = [(chunk, layer) for what, chunk, layer in store.calls if what == "ready" and chunk < 3]
    assert prefill == [(chunk, layer) for layer in range(LAYERS) for chunk in range(3)]  # as the layers computed
    longer = MemoryStore(store.parts)
    warm, parts = with_store(model, longer)
    deltas = drain(warm, [request("b", text + out, 4)])
    assert deltas["b"][0].cached_tokens == 5 * CHUNK
    assert [spec.chunk for spec in longer.specs] == []  # nothing new is full
    finish(warm, parts, longer)


def test_what_the_pool_has_and_the_store_lost_is_offered_again(model: Path) -> None:
    store = MemoryStore(most=0)
    running, parts = with_store(model, store)
    text = prompt(2 * CHUNK + 3)
    first = tokens(drain(running, [request("a", text, 2)]))
    assert not store.parts
    store.most = 100
    assert tokens(drain(running, [request("a", text, 2)])) == first
    finish(running, parts, store)
    assert len(store.parts) == 2
    assert running.stats().hit_tokens_by_source == {"pool": 32}


def test_pool_first_then_the_store_from_the_page_edge(model: Path) -> None:
    """The pool's match ends in the middle of a stored chunk: only the pages after it are loaded."""
    text = prompt(3 * CHUNK + 2)
    store = MemoryStore()
    first, parts = with_store(model, store)
    wanted = tokens(drain(first, [request("a", text, 4)]))["a"]
    finish(first, parts, store)
    again = MemoryStore(store.parts)
    running, parts = with_store(model, again)
    again.parts = {}
    drain(running, [request("short", text[: CHUNK + 9], 1)])  # three pages: one chunk and a half
    again.parts = store.parts
    deltas = drain(running, [request("a", text, 4)])
    assert tokens(deltas)["a"] == wanted
    assert deltas["a"][0].cached_by_source == {"pool": CHUNK + 8, "near": 16, "far": 8}
    finish(running, parts, again)


def test_prompt_logprobs_load_nothing(model: Path) -> None:
    text = prompt(3 * CHUNK)
    store = MemoryStore()
    first, _ = with_store(model, store)
    cold = drain(first, [request("a", text, 2, prompt_logprobs=2)])["a"][0].prompt_logprobs
    store.settle()
    again = MemoryStore(store.parts)
    running, parts = with_store(model, again)
    assert drain(running, [request("a", text, 2, prompt_logprobs=2)])["a"][0].prompt_logprobs == cold
    assert again.batches == []
    finish(running, parts, again)


def test_loads_of_a_step_are_one_batch_and_a_full_step_does_not_keep_them_waiting(model: Path) -> None:
    texts = [prompt(3 * CHUNK + 2, seed) for seed in range(3)]
    store = MemoryStore()
    first, _ = with_store(model, store)
    drain(first, [request(f"p{i}", text, 1) for i, text in enumerate(texts)])
    store.settle()
    again = MemoryStore(store.parts)
    running, parts = with_store(model, again, max_num_batched_tokens=8)
    again.gate.clear()
    running.add(request("long", prompt(60, 99), 1))  # fills every step for a while
    for i, text in enumerate(texts):
        running.add(request(f"p{i}", text, 1))
    running.step()
    assert again.batches == [3]
    again.gate.set()
    drain(running)
    finish(running, parts, again)


def test_while_one_loads_others_run_and_are_not_held_up(model: Path) -> None:
    text = prompt(3 * CHUNK + 2)
    store = MemoryStore()
    first, _ = with_store(model, store)
    wanted = tokens(drain(first, [request("a", text, 3)]))["a"]
    store.settle()
    again = MemoryStore(store.parts)
    running, parts = with_store(model, again)
    again.gate.clear()
    running.add(request("a", text, 3))
    running.add(request("b", prompt(9, 5), 6))
    seen: dict[str, list[int]] = {"a": [], "b": []}
    while len(seen["b"]) < 6:
        for delta in running.step():
            seen[delta.request] += delta.tokens
        running.check()
    assert seen["a"] == []
    for _ in range(3):  # only a load is pending: steps return, so that arrivals and aborts are seen
        assert running.step() == []
        assert not running.idle
    again.gate.set()
    assert tokens(drain(running))["a"] == wanted
    finish(running, parts, again)


def test_alone_a_forward_pass_follows_its_load_layer_by_layer(model: Path) -> None:
    text = prompt(3 * CHUNK + 2)
    store = MemoryStore()
    first, _ = with_store(model, store)
    wanted = tokens(drain(first, [request("a", text, 3)]))["a"]
    store.settle()
    again = MemoryStore(store.parts, hold_layer=1)
    running, parts = with_store(model, again)
    computed: list[int] = []
    run = parts.decoder.run

    def watched(forward: object, first_layer: int, last_layer: int) -> None:
        computed.append(first_layer)
        if first_layer == 1:
            again.gate.set()  # layer 0 was computed before anything of layer 1 was there
        run(forward, first_layer, last_layer)  # type: ignore[arg-type]

    parts.decoder.run = watched  # type: ignore[method-assign]
    again.gate.clear()
    running.add(request("a", text, 3, service="offline"))  # offline plans run layer by layer
    out: list[int] = []
    while not running.idle:
        for delta in running.step(lambda: False):
            out += delta.tokens
    assert computed[:LAYERS] == list(range(LAYERS))
    assert out == wanted
    finish(running, parts, again)


def test_sixteen_with_one_cold_prefix_compute_it_once_and_with_a_stored_one_load_it_once(model: Path) -> None:
    prefix = prompt(5 * CHUNK)
    crowd = [request(f"c{i}", [*prefix, *prompt(4, 50 + i)], 3) for i in range(16)]
    store = MemoryStore()
    running, parts = with_store(model, store)
    wanted = tokens(drain(running, crowd))
    assert running.stats().hit_tokens_total == 15 * len(prefix)
    finish(running, parts, store)
    assert len({spec.part for spec in store.specs}) == len(store.specs)
    again = MemoryStore(store.parts)
    warm, parts = with_store(model, again)
    assert tokens(drain(warm, crowd)) == wanted
    assert again.batches == [1]
    assert warm.stats().hit_tokens_total == 16 * len(prefix)
    finish(warm, parts, again)


def test_after_preemption_prefixes_come_back_from_the_store(model: Path) -> None:
    token_bytes = 2 * LAYERS * 2 * 16 * 4
    rivals = [request(f"v{i}", prompt(60, i), 90) for i in range(3)]
    plain, _ = engine(config(model))
    wanted = tokens(drain(plain, rivals))
    store = MemoryStore()
    running, parts = with_store(model, store, kv_bytes=26 * 8 * token_bytes)
    for rival in rivals:
        running.add(rival)
    out: dict[str, list[int]] = {}
    while not running.idle:
        for delta in running.step():
            out.setdefault(delta.request, []).extend(delta.tokens)
        running.check()
        store.settle()  # whatever the machine's pace, what was saved is there when it is wanted
    assert out == wanted
    stats = running.stats()
    assert stats.preemptions_total > 0
    assert stats.loads_total > 0
    assert stats.hit_tokens_total == 0  # counted once, at the first admission
    assert store.lookups.count(True) == 3
    assert store.lookups.count(False) >= stats.preemptions_total
    finish(running, parts, store)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_load_that_fails_costs_time_but_no_token(
    model: Path, alone: dict[str, list[int]], depth: int, layer: int
) -> None:
    store = MemoryStore()
    first, _ = with_store(model, store)
    drain(first, work())
    store.settle()
    again = MemoryStore(store.parts, broken_layer=layer)
    again.broken = set(random.Random(depth).sample(sorted(store.parts), len(store.parts) // 2))
    running, parts = with_store(model, again, pipeline_depth=depth)
    deltas = drain(running, work())
    assert tokens(deltas) == alone
    stats = running.stats()
    assert stats.loads_failed_total > 0
    assert sum(stats.hit_tokens_by_source.values()) == stats.hit_tokens_total < stats.prompt_tokens_total
    finish(running, parts, again)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_load_that_fails_in_the_middle_of_a_pass_gives_the_plans_up(model: Path, depth: int) -> None:
    """Also where a span computes elsewhere and waits there."""
    text = prompt(5 * CHUNK + 40)
    store = MemoryStore()
    first, _ = with_store(model, store)
    wanted = tokens(drain(first, [request("a", text, 3)]))["a"]
    store.settle()
    again = MemoryStore(store.parts, hold_layer=2, broken_layer=2)
    again.broken = {sorted(store.parts, key=lambda part: part.key)[0]}
    log: list[tuple[str, int]] = []

    def cut(decoder: object) -> list[object]:
        return [
            LocalSpan(decoder, range(1)),  # type: ignore[arg-type]
            ThreadSpan(decoder, range(1, 3), log),  # type: ignore[arg-type]
            LocalSpan(decoder, range(3, LAYERS)),  # type: ignore[arg-type]
        ]

    running, parts = with_store(model, again, pipeline_depth=depth, max_num_batched_tokens=24, spans=cut)
    again.gate.clear()
    running.add(request("a", text, 3))
    opened = False
    out: list[int] = []
    while not running.idle:
        if not opened and any(what == "start" for what, _ in log):
            opened = True
        if not opened:
            again.gate.set()  # by then layers 0 and 1 are there, and the rest is about to fail
        out += [token for delta in running.step() for token in delta.tokens]
        running.check()
    assert out == wanted
    assert running.stats().loads_failed_total == 1
    finish(running, parts, again)


@pytest.mark.parametrize("depth", [1, 3])
def test_two_hundred_aborts_while_prefixes_load_leave_nothing(model: Path, depth: int) -> None:
    rng = random.Random(depth)
    texts = [prompt(70, seed) for seed in range(6)]
    store = MemoryStore()
    first, _ = with_store(model, store)
    drain(first, [request(f"p{i}", text, 1) for i, text in enumerate(texts)])
    store.settle()
    again = MemoryStore(store.parts)
    again.broken = set(random.Random(7).sample(sorted(store.parts), 3))
    running, parts = with_store(
        model, again, pipeline_depth=depth, kv_bytes=60 * 8 * 1024, max_num_batched_tokens=32, caching=True
    )
    pending = [
        request(
            f"x{i}",
            [*texts[rng.randrange(6)][: rng.randrange(1, 70)], 5],
            rng.randrange(1, 20),
            service=rng.choice(["online", "offline"]),
        )
        for i in range(260)
    ]
    live: list[str] = []
    aborted = 0
    ended: dict[str, str] = {}

    def interrupt() -> bool:
        nonlocal aborted
        if live and rng.random() < 0.2:
            running.abort(rng.choice(live))
            aborted += 1
        return running.online_waiting

    while pending or not running.idle:
        again.gate.set() if rng.random() < 0.5 else again.gate.clear()
        while pending and len(live) < 24:
            item = pending.pop()
            running.add(item)
            live.append(item.id)
        if live and rng.random() < 0.6:
            running.abort(rng.choice(live))
            aborted += 1
        for delta in running.step(interrupt):
            if delta.finish is not None:
                assert delta.request not in ended
                ended[delta.request] = delta.finish
                live.remove(delta.request)
        running.check()
    assert len(ended) == 260
    assert aborted >= 50  # how many depends on how fast the loads are
    assert {"abort", "length"} == set(ended.values())
    assert running.stats().loads_total > 20
    again.gate.set()
    finish(running, parts, again)


def test_saves_that_are_not_packed_keep_their_pages_and_give_way_when_nothing_else_can_run(model: Path) -> None:
    store = MemoryStore()
    token_bytes = 2 * LAYERS * 2 * 16 * 4
    running, parts = with_store(model, store, kv_bytes=16 * 8 * token_bytes)
    store.pack_gate.clear()
    drain(running, [request("a", prompt(2 * CHUNK + 4), 1)])
    assert parts.group.allocator.used == 4  # two chunks wait to be packed
    big = request("b", prompt(14 * 8 - 4, 8), 3)
    assert len(tokens(drain(running, [big]))["b"]) == 3
    store.pack_gate.set()
    finish(running, parts, store)
    assert not any(spec.part in store.parts for spec in store.specs[:2])  # given up


def test_the_pool_may_shrink_under_loads_and_saves(model: Path) -> None:
    text = prompt(3 * CHUNK + 2)
    store = MemoryStore()
    first, _ = with_store(model, store)
    wanted = tokens(drain(first, [request("a", text, 20)]))["a"]
    store.settle()
    page = 8 * 2 * LAYERS * 2 * 16 * 4
    again = MemoryStore(store.parts)
    running, parts = with_store(model, again, kv_bytes=60 * page)
    again.gate.clear()
    again.pack_gate.set()
    running.add(request("a", text, 20))
    running.step()
    assert running.stats().loads_total == 1
    running.resize_kv(20 * page)
    running.check()
    assert tokens(drain(running))["a"] == wanted
    finish(running, parts, again)


def test_an_offline_step_given_up_saves_nothing_of_it_and_is_saved_when_it_is_done(model: Path) -> None:
    store = MemoryStore()
    running, parts = with_store(model, store)
    text = prompt(3 * CHUNK)
    asked = 0

    def interrupt() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            running.add(request("online", prompt(5, 4), 2))
            return True
        return False

    deltas = drain(running, [request("off", text, 2, service="offline")], interrupt)
    assert running.stats().abandoned_total == 1
    finish(running, parts, store)
    assert len(store.parts) == 3
    plain, _ = engine(config(model))
    assert tokens(deltas)["off"] == tokens(drain(plain, [request("off", text, 2)]))["off"]
    again = MemoryStore(store.parts)
    warm, parts = with_store(model, again)
    assert tokens(drain(warm, [request("off", [*text, 9], 2)])) == tokens(drain(plain, [request("off", [*text, 9], 2)]))
    finish(warm, parts, again)


def test_an_idle_store_costs_decode_steps_no_call_per_layer(model: Path) -> None:
    store = MemoryStore()
    running, parts = with_store(model, store)
    assert parts.flow is not None
    calls: list[str] = []
    parts.flow.wait = lambda plan, layer: calls.append("wait")  # type: ignore[method-assign, assignment]
    parts.flow.offer = lambda plan, layer: calls.append("offer")  # type: ignore[method-assign, assignment]
    drain(running, [request("a", prompt(5), 9)])
    assert calls == []
    assert store.running == [True, False] * (len(store.running) // 2)
    assert len(store.running) == 2 * 9
    finish(running, parts, store)
