"""Sequences whose next tokens another engine computes: plans stop at their fence, and everybody else goes on."""

from scheduler_world import PAGE, World, answer

from headrace.engine.sequence import Sequence


def fenced(at: int, *names: str, **options: object) -> World:
    """A world in which these sequences get a fence when they are admitted."""

    def claim(seq: Sequence, known: int) -> int | None:
        return max(at, known) if seq.id in names else None

    return World(claim=claim, **options)  # type: ignore[arg-type]


def test_one_that_waits_keeps_nobody_out_of_the_same_plan() -> None:
    here = fenced(0, "a")
    here.add("a", list(range(15)))
    here.add("b", list(range(20, 26)))
    plan = here.submit()
    assert plan is not None
    assert [chunk.seq for chunk in plan.chunks] == ["b"]
    assert [seq.id for seq in here.scheduler.running] == ["a", "b"]
    here.collect()
    while here.step() is not None:
        pass
    assert here.finished == {"b": "length"}


def test_a_plan_goes_up_to_the_fence_and_on_when_it_moves() -> None:
    here = fenced(2 * PAGE, "a")
    request = here.add("a", list(range(15)))
    plan = here.step()
    assert plan is not None
    assert [(chunk.start, chunk.length, chunk.sample) for chunk in plan.chunks] == [(0, 8, 0)]
    assert here.submit() is None
    seq = here.scheduler.get("a")
    here.scheduler.advance(seq, 0, 3 * PAGE)
    plan = here.step()
    assert plan is not None
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(8, 4)]
    here.scheduler.advance(seq, 0, None)
    assert here.scheduler.take_loads() == []
    here.drain()
    assert here.outputs["a"] == answer(request)


def test_what_has_come_meanwhile_is_loaded_and_counts() -> None:
    here = fenced(PAGE, "a")
    request = here.add("a", list(range(15)))
    here.step()
    seq = here.scheduler.get("a")
    here.scheduler.advance(seq, 3 * PAGE, 3 * PAGE)
    (order,) = here.scheduler.take_loads()
    assert (order.seq, order.start, order.end, order.counts) == (seq, 4, 12, True)
    here.bring(order, 12, {"disk": 1})
    assert here.submit() is None
    here.scheduler.advance(seq, 0, None)
    here.drain()
    assert here.outputs["a"] == answer(request)
    assert here.computed == 15 - 8 + 3
    assert here.scheduler.counters.hits_by_source == {"disk": 8}


def test_a_load_that_falls_short_is_computed_up_to_the_fence() -> None:
    here = fenced(0, "a")
    here.add("a", list(range(15)))
    assert here.submit() is None
    here.scheduler.advance(here.scheduler.get("a"), 3 * PAGE, 3 * PAGE)
    (order,) = here.scheduler.take_loads()
    here.bring(order, PAGE, {"disk": 1})
    plan = here.step()
    assert plan is not None
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(4, 8)]
    assert here.submit() is None


def test_who_gives_its_pages_up_has_no_fence_and_says_so() -> None:
    here = fenced(0, "a", "b")
    request = here.add("a", list(range(15)))
    here.add("b", list(range(20, 30)))
    assert here.submit() is None
    here.scheduler.preempt_last()
    assert here.left == ["b"]
    here.abort("a")
    assert here.left == ["b", "a"]
    assert here.submit() is None, "admitted anew, it waits again"
    seq = here.scheduler.get("b")
    here.scheduler.advance(seq, 2 * PAGE, None)
    (order,) = here.scheduler.take_loads()
    assert not order.counts, "only what the first admission finds counts"
    here.bring(order, 2 * PAGE, {})
    here.drain()
    assert here.outputs["b"] == answer(here.requests["b"])
    assert request.id in here.finished


def test_without_a_store_nobody_waits() -> None:
    here = fenced(0, "a")
    request = here.add("a", list(range(15)))
    assert here.submit() is None
    here.scheduler.forget_store()
    here.drain()
    assert here.outputs["a"] == answer(request)
