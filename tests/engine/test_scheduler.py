"""The scheduler over a device that checks every KV slot it reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import PAGE, World, answer

from headrace.engine.outcome import StepResult


def test_one_request_is_prefilled_in_chunks_and_decoded() -> None:
    world = World(budget=5)
    request = world.add("a", list(range(12)), max_tokens=3)
    world.drain()
    assert [plan.tokens for plan in world.plans] == [5, 5, 2, 1, 1]
    assert [plan.chunks[0].sample for plan in world.plans] == [0, 0, 1, 1, 1]
    assert world.outputs["a"] == answer(request)
    assert world.finished == {"a": "length"}
    assert world.allocator.used == 0


def test_decode_comes_first_and_prefill_rides_along() -> None:
    world = World(budget=8)
    world.add("a", [1, 2, 3], max_tokens=10)
    world.step()
    world.add("b", list(range(20)), max_tokens=2)
    plan = world.step()
    assert plan is not None
    assert [(chunk.seq, chunk.phase, chunk.length) for chunk in plan.chunks] == [
        ("a", "decode", 1),
        ("b", "prefill", 7),
    ]


@pytest.mark.parametrize("length", [PAGE * 3 - 1, PAGE * 3, PAGE * 3 + 1])
def test_a_cached_prompt_still_computes_its_last_tokens(length: int) -> None:
    world = World()
    prompt = list(range(length))
    first = world.add("a", prompt)
    world.drain()
    second = world.add("b", prompt)
    world.drain()
    assert world.outputs["a"] == world.outputs["b"] == answer(first) == answer(second)
    counters = world.scheduler.counters
    hits = length - 1
    assert counters.hit_tokens == hits
    assert counters.prompt_tokens == 2 * length
    assert world.computed == counters.computed_tokens == 2 * (length + 3) - hits


def test_another_salt_shares_nothing() -> None:
    world = World()
    for name, salt in (("a", ""), ("b", "x"), ("c", "y")):
        world.add(name, list(range(12)), salt=salt)
        world.drain()
    assert world.scheduler.counters.hit_tokens == 0
    world.add("d", list(range(12)), salt="x")
    world.drain()
    assert world.scheduler.counters.hit_tokens == 11


def test_a_prompt_that_parts_within_a_page_borrows_its_beginning() -> None:
    world = World()
    world.add("a", [1, 2, 3, 4, 5, 6, 7, 8])
    world.drain()
    other = world.add("b", [1, 2, 3, 4, 5, 6, 9, 9, 9])
    same_token = world.add("c", [1, 2, 8, 8, 8])
    world.drain()
    assert world.outputs["b"] == answer(other)
    assert world.outputs["c"] == answer(same_token)
    assert world.copied == 2
    assert world.scheduler.counters.hit_tokens == 6 + 2


def test_a_prefix_under_computation_is_computed_once() -> None:
    world = World(pages=64, budget=8, seqs=8, max_len=64)
    shared = list(range(24))
    for i in range(6):
        world.add(f"r{i}", [*shared, 40 + i], max_tokens=2)
    world.drain()
    assert world.scheduler.counters.hit_tokens == 5 * 24
    assert world.scheduler.counters.computed_tokens == 24 + 6 + 6


def test_a_waiting_prefix_does_not_hold_up_others() -> None:
    world = World(pages=64, budget=6, seqs=8)
    shared = list(range(28))
    world.add("a", [*shared, 41], max_tokens=1)
    world.step()
    world.add("b", [*shared, 42], max_tokens=2)
    other = world.add("c", [7, 7, 7], max_tokens=1)
    while "a" not in world.finished:
        world.step()
    world.drain()
    order = list(world.finished)
    assert order.index("c") < order.index("b")
    assert world.outputs["c"] == answer(other)


def test_when_the_owner_of_a_prefix_is_aborted_the_next_computes_it() -> None:
    world = World(pages=64, budget=6)
    shared = list(range(24))
    world.add("a", [*shared, 41])
    request = world.add("b", [*shared, 42])
    world.step()
    world.abort("a")
    world.drain()
    assert world.outputs["b"] == answer(request)
    assert world.scheduler.counters.hit_tokens in (4, 0)  # what a had finished


def test_online_does_not_wait_for_an_offline_prefix() -> None:
    world = World(pages=64, budget=6, seqs=4)
    shared = list(range(24))
    world.add("slow", [*shared, 41], online=False)
    world.step()
    world.add("talk", [9, 9], max_tokens=30)
    request = world.add("fast", [*shared, 42], max_tokens=2)
    world.drain()
    assert world.outputs["fast"] == answer(request)
    assert list(world.finished).index("fast") < list(world.finished).index("slow")


def test_memory_pressure_preempts_the_youngest_and_nothing_is_lost() -> None:
    world = World(pages=8, budget=16, seqs=4)
    requests = [world.add(name, [i, 1, 2, 3, 4], max_tokens=14) for i, name in enumerate("abc")]
    world.drain()
    assert world.scheduler.counters.preemptions > 0
    assert next(iter(world.finished)) == "a"
    for request in requests:
        assert world.outputs[request.id] == answer(request)
    assert world.scheduler.counters.prompt_tokens == 15  # counted once, preempted or not
    assert world.scheduler.counters.hit_tokens == 0


def test_offline_gives_up_rows_and_pages_for_online() -> None:
    world = World(pages=12, budget=16, seqs=2)
    offline = [world.add(f"off{i}", [i] * 9, max_tokens=12, online=False) for i in range(2)]
    world.step()
    assert len(world.scheduler.running) == 2
    online = world.add("on", list(range(20)), max_tokens=3)
    plan = world.step()
    assert plan is not None
    assert any(chunk.seq == "on" for chunk in plan.chunks)
    world.drain()
    assert next(iter(world.finished)) == "on"
    for request in [online, *offline]:
        assert world.outputs[request.id] == answer(request)


def test_an_abandoned_offline_step_is_planned_again() -> None:
    world = World(budget=8)
    request = world.add("off", list(range(10)), online=False)
    plan = world.submit()
    assert plan is not None
    assert plan.service == "offline"
    world.abandon()
    again = world.submit()
    assert again is not None
    assert again.chunks == plan.chunks
    world.collect()
    world.drain()
    assert world.outputs["off"] == answer(request)
    assert world.scheduler.counters.abandoned == 1


def test_a_step_with_an_online_chunk_is_online() -> None:
    world = World(budget=8)
    world.add("off", [1, 2, 3], online=False)
    world.add("on", [4, 5])
    plan = world.submit()
    assert plan is not None
    assert plan.service == "online"
    assert [chunk.seq for chunk in plan.chunks] == ["on", "off"]


def test_priority_orders_the_queue() -> None:
    world = World(budget=4, seqs=1)
    world.add("late", [1, 2], priority=5, max_tokens=1)
    world.add("soon", [3, 4], priority=-1, max_tokens=1)
    world.add("then", [5, 6], max_tokens=1)
    world.drain()
    assert list(world.finished) == ["soon", "then", "late"]


def test_abort_of_a_sequence_in_flight_ends_it_with_its_plan() -> None:
    world = World(depth=2, budget=4)
    world.add("a", list(range(12)))
    world.submit()
    world.submit()
    world.abort("a")
    assert "a" not in world.finished
    world.collect()
    assert "a" not in world.finished  # a second chunk is in flight
    world.collect()
    assert world.finished == {"a": "abort"}
    assert world.allocator.used == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_decode_is_shared_among_the_plans_in_flight(depth: int) -> None:
    world = World(pages=64, depth=depth, budget=30, seqs=6)
    for i in range(6):
        world.add(f"r{i}", [i], max_tokens=12)
    while any(seq.output_length == 0 for seq in world.scheduler.sequences):
        world.step()
    for _ in range(8):
        world.step()
    sizes = [plan.tokens for plan in world.plans[-6:]]
    assert max(sizes) <= 6 // depth + 1
    seen = [chunk.seq for plan in world.flight for chunk in plan.chunks]
    assert len(seen) == len(set(seen))


def test_a_prompts_chunks_follow_each_other_in_flight() -> None:
    world = World(depth=3, budget=4)
    request = world.add("a", list(range(12)))
    for _ in range(3):
        assert world.submit() is not None
    assert [plan.chunks[0].start for plan in world.flight] == [0, 4, 8]
    world.drain()
    assert world.outputs["a"] == answer(request)


def test_repeat_says_for_how_long_the_plan_stays_the_same() -> None:
    world = World(pages=64, budget=8)
    world.add("a", [1, 2, 3, 4, 5], max_tokens=20)
    world.add("b", [6, 7], max_tokens=20)
    plans = []
    while (plan := world.step()) is not None:
        plans.append(plan)
    decode = [plan for plan in plans if all(chunk.phase == "decode" for chunk in plan.chunks)]
    assert any(plan.repeat > 1 for plan in decode)
    for i, plan in enumerate(plans):
        for later in plans[i : i + plan.repeat]:
            assert [(c.seq, c.length, c.phase) for c in later.chunks] == [
                (c.seq, c.length, c.phase) for c in plan.chunks
            ]


def test_a_stop_token_ends_a_sequence() -> None:
    world = World()
    plain = world.add("a", [1, 2, 3], max_tokens=8)
    stop = answer(plain)[2]
    world.add("b", [1, 2, 3], max_tokens=8, stop=(stop,))
    world.drain()
    assert world.outputs["b"] == answer(plain)[: answer(plain).index(stop) + 1]
    assert world.finished["b"] == "stop"


requests = st.lists(
    st.tuples(
        st.integers(0, 2),  # which shared document
        st.integers(0, 20),  # how much of it
        st.integers(1, 6),  # own tokens
        st.integers(1, 12),  # max_tokens
        st.booleans(),  # online
        st.sampled_from(["", "s"]),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(
    work=requests,
    depth=st.integers(1, 3),
    pages=st.integers(11, 30),
    budget=st.integers(1, 24),
    seqs=st.integers(1, 5),
    caching=st.booleans(),
    moves=st.lists(st.integers(0, 5), max_size=40),
)
def test_any_mix_yields_the_right_tokens_and_leaks_nothing(
    work: list[tuple[int, int, int, int, bool, str]],
    depth: int,
    pages: int,
    budget: int,
    seqs: int,
    caching: bool,
    moves: list[int],
) -> None:
    world = World(pages=pages, depth=depth, budget=budget, seqs=seqs, caching=caching, max_len=44)
    pending = list(enumerate(work))
    aborted: set[str] = set()
    for move in moves:
        if move <= 1 and pending:
            number, (document, shared, own, max_tokens, online, salt) = pending.pop(0)
            prompt = [document * 7 + i % 5 for i in range(shared)] + [number] * own
            world.add(f"r{number}", prompt, max_tokens, online=online, salt=salt)
        elif move == 2 and world.outputs:
            victim = sorted(world.outputs)[len(world.plans) % len(world.outputs)]
            aborted.add(victim)
            world.abort(victim)
        elif move == 3 and world.flight and depth == 1 and world.flight[0].service == "offline":
            world.abandon()
        elif move == 4 and world.flight:
            world.collect()
        elif len(world.flight) < depth:
            world.submit()
    for number, (document, shared, own, max_tokens, online, salt) in pending:
        prompt = [document * 7 + i % 5 for i in range(shared)] + [number] * own
        world.add(f"r{number}", prompt, max_tokens, online=online, salt=salt)
    world.drain()
    for request in world.requests.values():
        if request.id not in aborted:
            assert world.outputs[request.id] == answer(request)
        else:
            assert answer(request)[: len(world.outputs[request.id])] == world.outputs[request.id]
    assert world.allocator.used == 0
    counters = world.scheduler.counters
    assert counters.computed_tokens <= world.computed


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_sequence_ends_alone(depth: int) -> None:
    world = World(depth=depth, budget=4)
    world.add("bad", list(range(12)))
    good = world.add("good", [1, 2, 3])
    for _ in range(depth):
        world.submit()
    plan = world.flight.popleft()
    world._record(world.scheduler.complete(plan.id, StepResult({}, errors={"bad": "not a number"})))
    world.drain()
    assert world.finished["bad"] == "error"
    assert world.outputs["good"] == answer(good)
    assert world.allocator.used == 0


def test_room_is_made_even_when_the_victims_hold_the_shared_prefix() -> None:
    world = World(pages=10, budget=64, seqs=4)
    shared = list(range(16))
    offline = world.add("off", [*shared, 40], max_tokens=8, online=False)
    world.step()
    world.step()
    online = world.add("on", [*shared, *[9] * 18], max_tokens=4)
    world.drain()
    assert next(iter(world.finished)) == "on"
    assert world.scheduler.counters.hit_tokens == 16
    for request in (online, offline):
        assert world.outputs[request.id] == answer(request)
