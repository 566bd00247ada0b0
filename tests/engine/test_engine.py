"""The engine over a real (tiny) model: whatever the batching, caching and order, the same tokens."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from engine_world import ThreadSpan, config, drain, engine, request, tokens

from headrace.bench.tiny_models import save
from headrace.core.errors import InvalidRequest, QueueFull
from headrace.core.request import Request
from headrace.engine import twin
from headrace.engine.kv_flow import RecordedFlow
from headrace.engine.pipeline import LocalSpan, Pipeline
from headrace.engine.twin import TwinSpan, TwinStep
from headrace.model.decoder import Forward


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=4)


def work(count: int = 10, seed: int = 3) -> list[Request]:
    rng = random.Random(seed)
    documents = [[rng.randrange(3, 300) for _ in range(70)] for _ in range(2)]
    made = []
    for i in range(count):
        prompt = documents[i % 2][: rng.randrange(70)] + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 40))]
        made.append(request(f"r{i}", prompt, rng.randrange(1, 24)))
    return made


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[int]]:
    """Each request on its own, without a cache."""
    running, _ = engine(config(model, caching=False, max_num_batched_tokens=512))
    found: dict[str, list[int]] = {}
    for item in work():
        found |= tokens(drain(running, [item]))
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [7, 64, 512])
def test_batched_chunked_and_in_flight_the_tokens_are_the_same(
    model: Path, alone: dict[str, list[int]], depth: int, budget: int
) -> None:
    running, parts = engine(config(model, pipeline_depth=depth, max_num_batched_tokens=budget))
    assert tokens(drain(running, work())) == alone
    assert tokens(drain(running, work())) == alone  # now with prefix hits
    assert running.stats().hit_tokens_total > 0
    assert parts.group.allocator.used == 0


def test_after_preemption_the_tokens_are_the_same(model: Path, alone: dict[str, list[int]]) -> None:
    token_bytes = 2 * 4 * 2 * 16 * 4
    running, _ = engine(config(model, kv_bytes=22 * 8 * token_bytes))
    assert tokens(drain(running, work())) == alone
    assert running.stats().preemptions_total > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_slow_span_elsewhere_keeps_plans_in_flight(model: Path, alone: dict[str, list[int]], depth: int) -> None:
    log: list[tuple[str, int]] = []
    spans: list[ThreadSpan] = []

    def cut(decoder: object) -> list[object]:
        spans.append(ThreadSpan(decoder, range(2, 3), log))  # type: ignore[arg-type]
        return [LocalSpan(decoder, range(2)), spans[0], LocalSpan(decoder, range(3, 4))]  # type: ignore[arg-type]

    running, _ = engine(config(model, pipeline_depth=depth, max_num_batched_tokens=24), spans=cut)  # type: ignore[arg-type]
    assert tokens(drain(running, work())) == alone
    started = max(sum(1 if what == "start" else -1 for what, _ in log[:i]) for i in range(len(log) + 1))
    assert started == 1  # one at a time on a span, in order
    order = [fwd for what, fwd in log if what == "start"]
    assert order == [fwd for what, fwd in log if what == "finish"]


def test_while_a_span_computes_elsewhere_the_next_plan_runs_here(model: Path) -> None:
    log: list[tuple[str, int]] = []
    here: list[str] = []

    class Watched(LocalSpan):
        def finish(self, fwd: object, interrupt: object) -> bool:
            here.append("closed" if not spans[0].gate.is_set() else "open")
            if len(here) == 2:
                spans[0].gate.set()  # only the second local run lets the first plan's remote span go on
            return super().finish(fwd, interrupt)  # type: ignore[arg-type]

    spans: list[ThreadSpan] = []

    def cut(decoder: object) -> list[object]:
        spans.append(ThreadSpan(decoder, range(2, 4), log))  # type: ignore[arg-type]
        spans[0].gate.clear()
        return [Watched(decoder, range(2)), spans[0]]  # type: ignore[arg-type]

    running, _ = engine(config(model, pipeline_depth=2, max_num_batched_tokens=8), spans=cut)  # type: ignore[arg-type]
    drain(running, [request("a", list(range(3, 30)), 2)])
    assert here[:2] == ["closed", "closed"]


def test_spans_must_cover_the_layers_in_order(model: Path) -> None:
    _, parts = engine(config(model))
    with pytest.raises(ValueError, match=r"not 0\.\.3 in order"):
        Pipeline(parts.decoder, [LocalSpan(parts.decoder, range(2)), LocalSpan(parts.decoder, range(3, 4))])


def test_each_layer_waits_for_its_kv_and_offers_it(model: Path) -> None:
    flow = RecordedFlow()
    running, _ = engine(config(model, pipeline_depth=2), flow=(flow, flow))
    drain(running, work(4))
    plans = {plan for _, plan, _ in flow.calls}
    assert len(plans) == running.stats().steps_total
    for plan in plans:
        assert flow.of_plan(plan) == [(what, layer) for layer in range(4) for what in ("wait", "offer")]


def test_an_offline_step_is_abandoned_between_layers_for_online_work(model: Path, alone: dict[str, list[int]]) -> None:
    running, _ = engine(config(model, max_num_batched_tokens=512))
    first, second = work()[:2]
    offline = Request(id=first.id, prompt=first.prompt, params=first.params, service="offline")
    asked = 0

    def interrupt() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:  # two layers of four are done
            running.add(second)
        return running.online_waiting

    deltas = drain(running, [offline], interrupt)
    found = tokens(deltas)
    assert running.stats().abandoned_total == 1
    assert found == {name: alone[name] for name in (first.id, second.id)}
    assert running.stats().pages_used == 0


def test_an_online_step_is_not_interrupted(model: Path) -> None:
    running, _ = engine(config(model))

    def interrupt() -> bool:
        raise AssertionError("asked during an online step")

    drain(running, work(2), interrupt)


def test_the_pool_grows_and_shrinks_between_steps(model: Path, alone: dict[str, list[int]]) -> None:
    running, parts = engine(config(model))
    page = parts.group.shape.page_bytes
    found: dict[str, list[int]] = {}
    for item in work():
        running.add(item)
    sizes = [60, 24, 200, 30, 18]
    while not running.idle:
        for delta in running.step():
            found.setdefault(delta.request, []).extend(delta.tokens)
        if sizes:
            running.resize_kv(sizes.pop(0) * page)
        running.check()
    assert found == alone
    assert parts.group.pages == 18
    running.add(request("big", [5] * 100, 20))
    with pytest.raises(InvalidRequest, match="may need 15 KV pages"):
        running.resize_kv(10 * page)
    drain(running)


@pytest.mark.parametrize("depth", [1, 3])
def test_two_hundred_requests_with_random_aborts_leave_nothing(model: Path, depth: int) -> None:
    rng = random.Random(depth)
    running, parts = engine(config(model, pipeline_depth=depth, kv_bytes=40 * 8 * 1024, max_num_batched_tokens=32))
    pending = [
        request(f"x{i}", [rng.randrange(3, 300)] * rng.randrange(1, 90), rng.randrange(1, 30)) for i in range(200)
    ]
    live: list[str] = []
    ended: dict[str, str] = {}
    while pending or not running.idle:
        while pending and len(live) < 24:
            item = pending.pop()
            running.add(item)
            live.append(item.id)
        if live and rng.random() < 0.4:
            running.abort(rng.choice(live))
        running.abort("unknown")
        for delta in running.step():
            if delta.finish is not None:
                assert delta.request not in ended
                ended[delta.request] = delta.finish
                live.remove(delta.request)
        running.check()
    assert len(ended) == 200
    assert {"abort", "length"} == set(ended.values())
    assert parts.group.allocator.used == 0


def test_prompt_logprobs_are_exact_with_a_cached_prefix_and_after_preemption(model: Path) -> None:
    prompt = [7 + i % 50 for i in range(45)]
    running, _ = engine(config(model, max_num_batched_tokens=16))
    cold = drain(running, [request("cold", prompt, 2, prompt_logprobs=3)])["cold"][0].prompt_logprobs
    assert cold is not None
    assert cold[0] is None
    assert [entry.token for entry in cold[1:] if entry is not None] == prompt[1:]
    warm = drain(running, [request("warm", prompt, 2, prompt_logprobs=3)])["warm"][0].prompt_logprobs
    assert warm == cold
    rival = request("rival", [11] * 60, 60)
    tight, _ = engine(config(model, kv_bytes=18 * 8 * 1024, max_num_batched_tokens=16))
    deltas = drain(tight, [rival, request("late", prompt, 40, prompt_logprobs=3)])
    assert tight.stats().preemptions_total > 0
    again = deltas["late"][0].prompt_logprobs
    assert again is not None
    assert len(again) == len(cold)
    for old, new in zip(cold[1:], again[1:], strict=True):
        assert old is not None
        assert new is not None
        assert (old.token, old.rank) == (new.token, new.rank)
        assert old.logprob == pytest.approx(new.logprob, abs=1e-4)


def test_a_resumed_sequence_goes_on_with_the_same_text(model: Path) -> None:
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
    running, _ = engine(config(model))
    whole = tokens(drain(running, [request("whole", [5, 6, 7], 20, **sampled)]))["whole"]
    other, _ = engine(config(model))
    resumed = request("rest", [5, 6, 7], 20, resume=whole[:9], **sampled)
    crowd = [request(f"c{i}", [i + 3] * 9, 12) for i in range(5)]
    assert tokens(drain(other, [*crowd, resumed]))["rest"] == whole[9:]


def test_decode_and_prompt_rows_as_two_halves_give_the_same_tokens(
    model: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    split: list[tuple[int, int]] = []
    finish = TwinSpan.finish

    def counted(self: TwinSpan, fwd: Forward, interrupt: Callable[[], bool] | None) -> bool:
        if isinstance(fwd.step, TwinStep):
            split.append((fwd.step.edge, len(fwd.hidden) - fwd.step.edge))
        return finish(self, fwd, interrupt)

    monkeypatch.setattr(TwinSpan, "finish", counted)
    monkeypatch.setattr(twin, "MINIMUM_ROWS", 2)
    running, _ = engine(config(model, overlap=True, max_num_batched_tokens=24))
    asked = iter(work())
    deltas = drain(running, [next(asked)])
    for item in asked:  # each comes while others decode
        running.add(item)
        for delta in running.step():
            deltas.setdefault(delta.request, []).append(delta)
    for name, parts in drain(running).items():
        deltas.setdefault(name, []).extend(parts)
    assert tokens(deltas) == alone
    assert len(split) > 3
    assert all(min(rows) >= 2 for rows in split)


def test_an_offline_step_of_two_halves_is_given_up_between_layers(model: Path, alone: dict[str, list[int]]) -> None:
    offline = [msgspec.structs.replace(item, service="offline") for item in work()]
    running, _ = engine(config(model, overlap=True, max_num_batched_tokens=24))
    calls = iter(range(10**6))
    assert tokens(drain(running, offline, interrupt=lambda: next(calls) % 11 == 10)) == alone


def test_the_pace_of_a_job_bounds_its_steps(model: Path, alone: dict[str, list[int]]) -> None:
    running, parts = engine(config(model))
    running.limit_offline(9)
    offline = [msgspec.structs.replace(item, service="offline") for item in work()]
    seen = drain(running, offline)
    paced = parts.scheduler.counters.steps
    assert tokens(seen) == alone
    again, parts = engine(config(model))
    drain(again, offline)
    assert paced > 1.5 * parts.scheduler.counters.steps


def test_prompts_that_part_within_a_page_share_its_beginning(model: Path) -> None:
    beginning = list(range(1, 22))  # two pages of 8 and 5 tokens
    requests = [request(str(i), [*beginning, 50 + i, 60 + i, 70 + i], 12) for i in range(4)]
    plain, _ = engine(config(model, caching=False))
    expected = tokens(drain(plain, requests))
    sharing, _ = engine(config(model))
    drain(sharing, [request("first", [*beginning, 90, 91, 92, 93], 2)])
    deltas = drain(sharing, requests)
    assert tokens(deltas) == expected
    assert {parts[0].cached_tokens for parts in deltas.values()} == {len(beginning)}


def test_cached_tokens_and_computed_tokens_add_up(model: Path) -> None:
    running, _ = engine(config(model))
    items = work(6)
    deltas = drain(running, items)
    stats = running.stats()
    assert stats.prompt_tokens_total == sum(len(item.prompt) for item in items)
    assert stats.hit_tokens_total == sum(parts[0].cached_tokens for parts in deltas.values())
    generated = stats.output_tokens_total - len(items)  # the last token of each is never computed
    assert stats.computed_tokens_total == stats.prompt_tokens_total - stats.hit_tokens_total + generated


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [1] * 5000}, "at most 4096 fit"),
        ({"prompt": [1, 307]}, r"0\.\.306"),
        ({"prompt": [1, -1]}, r"0\.\.306"),
        ({"name": "used"}, "in use"),
    ],
)
def test_what_cannot_run_is_refused_at_the_door(model: Path, fields: dict[str, object], complaint: str) -> None:
    running, _ = engine(config(model))
    running.add(request("used", [1, 2]))
    with pytest.raises(InvalidRequest, match=complaint):
        running.add(request(str(fields.get("name", "new")), fields.get("prompt", [1])))  # type: ignore[arg-type]
    drain(running)
    assert running.stats().requests_total == {"length": 1}


def test_the_queue_is_bounded(model: Path) -> None:
    running, _ = engine(config(model, max_queue=3))
    for i in range(3):
        running.add(request(f"q{i}", [4]))
    with pytest.raises(QueueFull, match="3 requests"):
        running.add(request("q3", [4]))
    drain(running)
    running.add(request("q3", [4]))
    drain(running)
