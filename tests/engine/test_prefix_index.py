"""Keys of pages: canonical, salted, and the same in every process."""

import subprocess
import sys

import numpy as np

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.prefix_index import PageHasher, PrefixIndex
from headrace.engine.sequence import Sequence

TOKENS = np.arange(4, dtype=np.int32)


def sequence(prompt: list[int], salt: str = "") -> Sequence:
    request = Request(id="x", prompt=prompt, params=SamplingParams(max_tokens=4), cache_salt=salt)
    return Sequence(request, 0, 1000)


def test_keys_chain_over_all_tokens_before() -> None:
    hasher = PageHasher("f", 4)
    base = hasher.extend(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]), 2)
    other = hasher.extend(sequence([1, 2, 3, 4, 5, 6, 7, 9, 9]), 2)
    first = hasher.extend(sequence([0, 2, 3, 4, 5, 6, 7, 8, 9]), 2)
    assert base[0] == other[0]
    assert base[1] != other[1]
    assert first[0] != base[0]
    assert first[1] != base[1]


def test_fingerprints_and_salts_never_share() -> None:
    prompt = list(range(8))
    keys = {
        PageHasher(fingerprint, 4).extend(sequence(prompt, salt), 1)[0]
        for fingerprint in ("a", "b", "ab")
        for salt in ("", "a", "b", "\ud800")
    }
    assert len(keys) == 12


def test_keys_are_the_same_in_another_process() -> None:
    prompt = list(range(100, 120))
    here = [key.hex() for key in PageHasher("f", 4).extend(sequence(prompt, "s"), 5)]
    script = (
        "from test_prefix_index import *\n"
        "print(*[k.hex() for k in PageHasher('f', 4).extend(sequence(list(range(100, 120)), 's'), 5)])"
    )
    env = {"PYTHONPATH": __file__.rsplit("/", 1)[0], "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    assert there.stdout.split() == here


def test_keys_of_a_growing_sequence_continue() -> None:
    hasher = PageHasher("f", 2)
    grown = sequence([1, 2, 3])
    hasher.extend(grown, 1)
    grown.append(4)
    whole = sequence([1, 2, 3, 4])
    assert hasher.extend(grown, 2) == hasher.extend(whole, 2)


def test_the_first_page_of_a_key_stays() -> None:
    index = PrefixIndex()
    index.insert(b"k", 1, b"", TOKENS)
    index.insert(b"k", 2, b"", TOKENS)
    assert index.match([b"k"], 1) == [1]
    assert 2 not in index
    index.evict(1)
    assert index.match([b"k"], 1) == []


def test_only_the_announcer_withdraws() -> None:
    index = PrefixIndex()
    owner, other = sequence([1]), sequence([2])
    owner.hashes, other.hashes = [b"k", b"l"], [b"k"]
    index.announce(owner, [b"k", b"l"])
    index.announce(other, [b"k"])
    index.withdraw(other)
    assert index.pending_owner(b"k") is owner
    index.insert(b"k", 3, b"", TOKENS)
    assert index.pending_owner(b"k") is None
    index.withdraw(owner)
    assert index.pending_owner(b"l") is None


def page(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_page_that_goes_on_alike_for_longest_is_found() -> None:
    index = PrefixIndex()
    index.insert(b"a", 1, b"p", page(5, 6, 7, 8))
    index.insert(b"b", 2, b"p", page(5, 6, 9, 9))
    index.insert(b"c", 3, b"q", page(5, 6, 7, 9))
    assert index.nearest(b"p", page(5, 6, 7, 1)) == (1, 3)
    assert index.nearest(b"p", page(5, 6, 9)) == (2, 3)
    assert index.nearest(b"p", page(6, 6, 7, 8)) == (-1, 0)
    assert index.nearest(b"r", page(5, 6, 7, 8)) == (-1, 0)
    assert index.nearest(b"p", page()) == (-1, 0)
    index.move(1, 9)
    assert index.nearest(b"p", page(5, 6, 7, 8)) == (9, 4)
    index.evict(9)
    assert index.nearest(b"p", page(5, 6, 7, 8)) == (2, 2)
    index.evict(2)
    assert index.nearest(b"p", page(5, 6, 7, 8)) == (-1, 0)
