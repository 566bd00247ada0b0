"""The order in which chunks go: by use, by cost, and never a prefix before what follows it."""

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.store.catalog.eviction import EvictionOrder, Item, rounded_density
from headrace.store.catalog.leases import Leases


def item(name: int, weight: float | None = 1.0, nbytes: int = 100) -> Item:
    made = Item(name.to_bytes(32, "big"))
    made.weight, made.nbytes = weight, nbytes
    return made


def drain(order: EvictionOrder) -> list[Item]:
    gone = []
    while (first := order.first()) is not None:
        order.evicted(first)
        order.remove(first)
        gone.append(first)
    return gone


def test_equal_costs_make_it_lru() -> None:
    order = EvictionOrder()
    items = [item(i) for i in range(5)]
    for at, listed in enumerate(items):
        order.add(listed, float(at))
    order.touch([items[0]], 10.0)
    order.touch([items[3]], 11.0)
    assert drain(order) == [items[1], items[2], items[4], items[0], items[3]]
    assert len(order) == 0


def test_of_equally_old_ones_the_cheapest_goes_first() -> None:
    order = EvictionOrder()
    dear, cheap, middle = item(1, 16.0), item(2, 1.0), item(3, 4.0)
    for listed in (dear, cheap, middle):
        order.add(listed, 0.0)
    assert drain(order) == [cheap, middle, dear]


def test_a_dear_one_that_nobody_uses_goes_in_the_end() -> None:
    order = EvictionOrder()
    dear = item(0, 8.0)
    order.add(dear, 0.0)
    for name in range(1, 2000):  # cheap ones come and go; the floor rises with every one
        order.add(item(name), float(name))
        first = order.first()
        assert first is not None
        order.evicted(first)
        order.remove(first)
        if first is dear:
            assert name > 4
            return
    raise AssertionError("never")


def test_one_of_unknown_weight_counts_as_the_average() -> None:
    order = EvictionOrder()
    unknown, cheap, dear = item(0, None), item(1, 1.0), item(2, 64.0)
    for listed in (unknown, cheap, dear):
        order.add(listed, 0.0)
    order.touch([unknown], 1.0)
    assert drain(order) == [cheap, unknown, dear]


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=20), st.randoms())
def test_no_chunk_of_a_chain_goes_before_one_behind_it(weights: list[float], rng: random.Random) -> None:
    order = EvictionOrder()
    chain: list[Item] = []
    for depth, weight in enumerate(weights):
        chain.append(item(depth, weight))
        order.add(chain[-1], float(depth), chain[-2] if depth else None)
        if rng.random() < 0.3:
            order.touch(chain, float(depth))
        if rng.random() < 0.3:
            order.touch(chain[: rng.randint(1, len(chain))], float(depth))
    assert drain(order) == chain[::-1]


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["add", "touch", "remove", "evict"])), max_size=200))
def test_the_first_is_always_the_least(steps: list[tuple[int, str]]) -> None:
    order = EvictionOrder()
    listed: dict[int, Item] = {}
    for now, (name, action) in enumerate(steps):
        if action == "add" and name not in listed:
            listed[name] = item(name, float(name % 7), 10 + name)
            order.add(listed[name], float(now))
        elif action == "touch" and name in listed:
            order.touch([listed[name]], float(now))
        elif action == "remove" and name in listed:
            order.remove(listed.pop(name))
        elif action == "evict" and listed:
            first = order.first()
            assert first is not None
            order.evicted(first)
            order.remove(first)
            del listed[int.from_bytes(first.key, "big")]
        first = order.first()
        assert first is (min(listed.values(), key=lambda one: one.order) if listed else None)
        assert len(order) == len(listed)


def test_cost_is_compared_by_powers_of_two() -> None:
    assert rounded_density(3.0, 1) == rounded_density(2.0, 1) == 2.0
    assert rounded_density(1.9, 1) == 1.0
    assert rounded_density(0.0, 1) == 0.0


def test_a_lease_ends_by_release_by_time_or_with_its_holder() -> None:
    leases = Leases()
    keys = [bytes([i]) * 32 for i in range(4)]
    assert leases.take(keys[:2], "a", 10.0, 0.0) == 2
    assert leases.take(keys, "b", 10.0, 0.0) == 0
    assert leases.take(keys[2:], "b", 10.0, 0.0) == 2
    assert leases.take(keys, "a", 20.0, 5.0) == 2, "its own again, then somebody else's"
    leases.release(keys, "a")
    assert [leases.holder(key, 5.0) for key in keys] == [None, None, "b", "b"]
    assert leases.holder(keys[2], 10.0) is None, "its deadline has passed"
    assert leases.take(keys[2:3], "a", 30.0, 10.0) == 1
    leases.release_all("b")
    assert not leases.holds("b")
    assert len(leases) == 1
    leases.expire(30.0)
    assert len(leases) == 0
    assert not leases.holds("a")


def test_leases_are_bounded() -> None:
    leases = Leases(limit=3)
    keys = [bytes([i]) * 32 for i in range(5)]
    assert leases.take(keys, "a", 10.0, 0.0) == 3
    assert leases.take(keys[3:], "b", 20.0, 10.0) == 2, "the old ones are over"
