"""A prefix that several engines are asked for at once is computed by one; the others wait, and never too long."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from engine_world import config, drain, engine, request, tokens
from lease_world import CHUNK, LEASE_SECONDS, Nodes, slow_home

from headrace.bench.tiny_models import save
from headrace.core.request import Request
from headrace.engine.core import REST_SECONDS
from headrace.store.settings import StoreSettings
from headrace.store.tiers.faulty import Fault, FaultPlan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.fixture
def nodes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("HEADRACE_HOME", str(slow_home(tmp_path / "home")))
    made = Nodes(model, tmp_path)
    yield made
    made.end()


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def alone(model: Path, *requests: Request, caching: bool = False) -> dict[str, list[int]]:
    """Each request on its own, without a store."""
    running, _ = engine(config(model, caching=caching, max_num_batched_tokens=512, kv_bytes=8 << 20))
    found: dict[str, list[int]] = {}
    for item in requests:
        found |= tokens(drain(running, [item]))
    return found


TEXT = prompt(20 * CHUNK + 5)


def test_sixteen_requests_with_one_cold_prefix_over_two_engines_compute_it_once(model: Path, nodes: Nodes) -> None:
    text = prompt(3000)
    asked = [request(f"r{i}", [*text, 5 + i], 3) for i in range(16)]
    one, two = nodes.start(max_num_batched_tokens=256), nodes.start(max_num_batched_tokens=256)
    one.add(*asked[::2])
    two.add(*asked[1::2])
    nodes.run()
    assert one.tokens() | two.tokens() == alone(model, *asked, caching=True)
    # Of each request also its last tokens and what it generates is computed.
    assert one.computed + two.computed <= 1.1 * 3000 + 16 * (CHUNK + 3)
    for tier in one.engine.stats().store_tiers.values():
        assert tier["parts"] == 3000 // CHUNK
    assert (one.waits, two.waits) == ((0, 0), (1, 0))
    stats = two.engine.stats()
    assert stats.hit_tokens_total == sum(stats.hit_tokens_by_source.values())
    assert stats.hit_tokens_total == sum(deltas[0].cached_tokens for deltas in two.deltas.values())
    assert stats.hit_tokens_by_source["pool"] < stats.hit_tokens_total


def test_parts_are_loaded_as_they_appear_and_others_go_on(nodes: Nodes) -> None:
    one, two = nodes.start(), nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)  # 64 of its tokens
    two.add(request("b", TEXT, 2), request("other", prompt(50, 9), 6))
    seq = two.engine._scheduler.get("b")
    while "other" not in two.deltas or two.deltas["other"][-1].finish is None:
        nodes.step(two)
    assert seq.computed == seq.fence == 4 * CHUNK, "what had come is loaded, nothing else is computed"
    for done in range(8, 20, 4):
        nodes.step(one)
        while seq.computed < done * CHUNK:
            nodes.step(two)
        assert seq.computed == done * CHUNK
    assert two.computed == 50 + 5
    nodes.run()
    assert two.computed == 50 + 5 + 5 + 1
    assert one.tokens()["a"] == two.tokens()["b"]
    assert two.deltas["b"][0].cached_tokens == 20 * CHUNK
    assert two.store.stats().saves_present == 0, "what it loaded it does not offer"


def test_an_engine_that_can_only_wait_rests_between_two_looks(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = nodes.start(), nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)
    two.add(request("b", TEXT, 2))
    while two.engine._scheduler.get("b").computed < 4 * CHUNK:
        nodes.step(two)
    flow, rests = two.parts.flow, []
    assert flow is not None
    rest = flow.rest

    def noted(seconds: float) -> None:
        rests.append(seconds)
        rest(seconds)

    monkeypatch.setattr(flow, "rest", noted)
    nodes.step(two, two, two)
    assert rests == [REST_SECONDS] * 3
    nodes.run()


def test_an_engine_of_its_own_asks_once_and_says_once(nodes: Nodes) -> None:
    one = nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.run()
    assert one.lease_calls == 2
    one.add(request("b", TEXT, 2))
    nodes.run()
    assert one.lease_calls == 2, "all of it is there"


def test_what_would_not_be_saved_is_not_leased_and_not_waited_for(nodes: Nodes) -> None:
    one, two = nodes.start(), nodes.start(StoreSettings(replication="none"))
    one.add(request("a", TEXT, 2))
    nodes.step(one)
    two.add(request("b", [*prompt(40, 5), *TEXT], 2), request("c", TEXT, 2))
    nodes.run(two)
    assert two.lease_calls == 0
    assert two.waits == (0, 0)
    nodes.run()
    assert one.tokens()["a"] == two.tokens()["c"]


def test_a_holder_that_is_aborted_leaves_the_rest_to_the_one_that_waits(model: Path, nodes: Nodes) -> None:
    one, two = nodes.start(), nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)
    two.add(request("b", TEXT, 2))
    nodes.step(two)
    one.engine.abort("a")
    nodes.step(one)
    assert one.leases == 0
    nodes.run(two)
    assert two.tokens() == alone(model, request("b", TEXT, 2))
    assert two.computed == len(TEXT) - 4 * CHUNK + 1
    assert two.waits == (1, 0)


def test_a_holder_that_is_preempted_lets_go_until_it_runs_again(nodes: Nodes) -> None:
    one, two = nodes.start(), nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)
    assert one.leases == 16
    one.engine._scheduler.preempt_last()
    assert not any(two.store.leased(two.keys(TEXT)))
    nodes.run()


def test_a_holder_whose_tiers_fail_keeps_nobody_waiting(model: Path, nodes: Nodes) -> None:
    one = nodes.start(faults=FaultPlan(seed=1, rates={Fault.WRITE_ERROR: 1.0}))
    two = nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)
    assert two.store.leased(two.keys(TEXT)) == [False] * 4 + [True] * 16
    two.add(request("b", TEXT, 2))
    nodes.run()
    assert two.tokens() == alone(model, request("b", TEXT, 2))
    assert two.waits[1] == 0


def test_a_holder_whose_store_takes_only_some_chunks_leaves_the_others_to_who_waits(model: Path, nodes: Nodes) -> None:
    one, two = nodes.start(StoreSettings(replication="all", write_queue=1)), nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)  # chunk 0 is taken, 1 to 3 are not
    assert two.store.leased(two.keys(TEXT)[1:]) == [False] * 3 + [True] * 16
    two.add(request("b", TEXT, 2))
    while two.computed < 3 * CHUNK:
        nodes.step(two)
    assert two.engine._scheduler.get("b").fence == 4 * CHUNK, "the rest is still the other's"
    nodes.run()
    assert two.tokens() == alone(model, request("b", TEXT, 2))
    assert two.waits[1] == 0
    # Of each of the holder's steps it lacked three chunks; two more that lay behind those when the holder was done.
    assert two.computed <= (5 * 3 + 2) * CHUNK + 5 + 1


def test_saves_that_pages_are_missing_for_end_their_leases_too(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.saving.POOL_SHARE", 0.0)
    one, two = nodes.start(), nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)
    assert two.store.leased(two.keys(TEXT)) == [False] * 4 + [True] * 16
    nodes.run()


def test_who_waits_for_a_holder_that_stands_still_computes_after_as_long_as_that_takes(
    model: Path, nodes: Nodes
) -> None:
    one, two = nodes.start(), nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)
    begun = nodes.clock.now
    two.add(request("b", TEXT, 2))
    seq = two.engine._scheduler._sequences["b"]
    nodes.step(two)
    while seq.computed < 4 * CHUNK:
        nodes.step(two)
    compute = two.parts.flow._compute_time(4 * CHUNK, 16 * CHUNK)  # type: ignore[union-attr]
    while two.computed == 0:
        nodes.step(two)
    assert 0.9 * compute <= nodes.clock.now - begun <= 1.25 * compute + 10 * 0.02
    assert nodes.clock.now - begun < LEASE_SECONDS
    nodes.run(two)
    assert two.tokens() == alone(model, request("b", TEXT, 2))
    assert two.waits == (1, 1)
    assert two.engine.stats().store["wait_seconds"] == pytest.approx(compute * 1.25, rel=0.5)
    nodes.run()
    assert one.tokens()["a"] == two.tokens()["b"]


def test_a_lease_past_its_deadline_is_anybodys(nodes: Nodes) -> None:
    one, two = nodes.start(StoreSettings(replication="all", lease_seconds=0.3)), nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)
    begun = nodes.clock.now
    two.add(request("b", TEXT, 2))
    nodes.step(two)
    while two.computed == 0:
        nodes.step(two)
    assert 0.25 <= nodes.clock.now - begun <= 0.5
    nodes.run(two)
    assert two.waits == (1, 0)
    nodes.run()
    assert one.tokens()["a"] == two.tokens()["b"]


def test_a_long_prompt_renews_its_leases(nodes: Nodes) -> None:
    one, two = nodes.start(), nodes.start()
    one.add(request("a", TEXT, 2))
    for _ in range(4):
        nodes.step(one)
        nodes.clock.now += 0.6 * LEASE_SECONDS
        one.engine._parts.flow.settle()  # type: ignore[union-attr]
        nodes.clock.now += 0.35 * LEASE_SECONDS
        assert two.store.leased(two.keys(TEXT)[19:]) == [True]
    nodes.run()


def test_a_closed_engine_has_no_leases_and_its_waiting_sequences_go_on(nodes: Nodes) -> None:
    one, two = nodes.start(), nodes.start()
    one.add(request("a", TEXT, 2))
    nodes.step(one)
    two.add(request("b", TEXT, 2))
    nodes.step(two)
    assert two.engine._scheduler.get("b").fence is not None
    assert two.engine.close(60)
    nodes.nodes.remove(two)
    while not two.engine.idle:
        for delta in two.engine.step():
            two.deltas.setdefault(delta.request, []).append(delta)
        two.engine.check()
    watcher = nodes.store(one.store.layout)
    assert any(watcher.leased(one.keys(TEXT)))
    assert one.engine.step() is not None
    one.engine.abort("a")
    nodes.run(one)
    assert not any(watcher.leased(one.keys(TEXT)))
    watcher.close()
    assert len(two.tokens()["b"]) == 2


def test_a_prefix_that_came_while_its_sequence_queued_is_loaded(nodes: Nodes) -> None:
    one, two = nodes.start(), nodes.start(max_num_seqs=1)
    two.add(request("first", prompt(30, 8), 12))
    nodes.step(two)
    two.add(request("b", TEXT, 2))
    two.parts.flow.stored(two.engine._scheduler.get("b"))  # type: ignore[union-attr]
    one.add(request("a", TEXT, 2))
    nodes.run(one)
    nodes.run(two)
    assert two.deltas["b"][0].cached_tokens == 20 * CHUNK
    assert one.tokens()["a"] == two.tokens()["b"]
    assert two.computed == 30 + 11 + 5 + 1


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_the_tokens_are_the_same_and_no_lease_is_left(model: Path, nodes: Nodes, seed: int) -> None:
    rng = random.Random(seed)
    documents = [prompt(90, document) for document in range(2)]
    asked = []
    for i in range(14):
        text = documents[i % 2][: rng.randrange(20, 90)] + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 40))]
        asked.append(request(f"r{i}", text, rng.randrange(1, 30), service=rng.choice(["online", "offline"])))
    small = {"kv_bytes": 1 << 17, "max_num_batched_tokens": 24, "pipeline_depth": rng.choice([1, 3])}
    engines = [nodes.start(**small) for _ in range(2)]
    wanted = alone(model, *asked)
    left = list(asked)
    aborted = set()
    while left or any(not node.engine.idle for node in engines):
        if left and rng.random() < 0.5:
            rng.choice(engines).add(left.pop(0))
        node = rng.choice(engines)
        if rng.random() < 0.05:
            name = f"r{rng.randrange(14)}"
            aborted.add(name)
            node.engine.abort(name)
        nodes.step(node)
    answers = engines[0].tokens() | engines[1].tokens()
    for item in asked:
        if item.id in aborted:
            assert answers.get(item.id, []) == wanted[item.id][: len(answers.get(item.id, []))]
        else:
            assert answers[item.id] == wanted[item.id]


HOLD = """
import sys, threading, msgspec, numpy as np
from pathlib import Path
from headrace.store.layout import KVLayout
from headrace.store.store import KVStore
from headrace.store.tiers.spec import build_tiers
layout, specs, folder, tokens = msgspec.json.decode(sys.argv[1], type=tuple[KVLayout, list[str], str, list[int]])
store = KVStore(layout, build_tiers(specs, Path(folder)))
print(store.lease(store.keys(np.array(tokens, np.int32))), flush=True)
threading.Event().wait()
"""


def test_a_holder_that_is_killed_keeps_nobody_waiting(model: Path, nodes: Nodes) -> None:
    one = nodes.start()
    said = msgspec.json.encode((one.store.layout, nodes.specs, str(nodes.folder), TEXT)).decode()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, said], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert int(holder.stdout.readline()) == 20
        one.add(request("a", TEXT, 2))
        nodes.step()
        assert one.engine._scheduler.get("a").fence == 0
    finally:
        holder.kill()
        holder.communicate()
    pause, until = threading.Event(), time.monotonic() + 60
    while any(one.store.leased(one.keys(TEXT))):  # until the owner of the catalog has seen it
        assert time.monotonic() < until
        pause.wait(0.01)
    nodes.run()
    assert one.tokens() == alone(model, request("a", TEXT, 2))
    assert one.waits == (1, 0)
