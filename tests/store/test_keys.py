import os
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.prefix_index import PageHasher
from headrace.store.keys import ChunkHasher, salt_tag
from headrace.store.part import KEY_BYTES

FINGERPRINT = "ab" * 32
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=70).map(lambda ids: np.array(ids, np.int32))


@given(tokens, st.integers(1, 9), st.text(max_size=5))
def test_one_key_for_each_full_chunk_and_known_ones_are_kept(ids: np.ndarray, size: int, salt: str) -> None:
    hasher = ChunkHasher(FINGERPRINT, size)
    keys = hasher.extend([], ids, salt)
    assert len(keys) == len(ids) // size
    assert all(len(key) == KEY_BYTES for key in keys)
    for known in range(len(keys) + 1):
        assert hasher.extend(hasher.extend([], ids[: known * size], salt), ids, salt) == keys
    assert hasher.extend(keys, ids[:0], salt) == keys
    wide = np.zeros(2 * len(ids), np.int32)
    wide[::2] = ids
    assert hasher.extend([], wide[::2], salt) == keys  # not contiguous
    assert hasher.extend([], ids.astype(">i4"), salt) == keys  # other byte order


@given(tokens, st.data())
def test_a_changed_token_changes_its_key_and_all_after_it(ids: np.ndarray, data: st.DataObject) -> None:
    size = 4
    hasher = ChunkHasher(FINGERPRINT, size)
    keys = hasher.extend([], ids, "")
    if not keys:
        return
    at = data.draw(st.integers(0, len(keys) * size - 1))
    other = ids.copy()
    other[at] ^= 1
    changed = hasher.extend([], other, "")
    assert changed[: at // size] == keys[: at // size]
    assert not set(changed[at // size :]) & set(keys)


def test_nothing_is_shared_across_salts_models_chunk_sizes_or_with_pages() -> None:
    ids = np.arange(64, dtype=np.int32)
    seen: set[bytes] = set()
    count = 0
    for fingerprint, salt in (
        (FINGERPRINT, ""),
        (FINGERPRINT, "a"),
        ("cd" * 32, ""),
        ("cd" * 32, "a"),
        ("x", "yz"),
        ("xy", "z"),
    ):
        for size in (16, 32):
            keys = ChunkHasher(fingerprint, size).extend([], ids, salt)
            seen.update(keys)
            count += len(keys)
        seen.add(ChunkHasher(fingerprint, 16).root(salt))
        count += 1
    assert len(seen) == count
    page_root = PageHasher(FINGERPRINT, 16).root("")
    assert ChunkHasher(FINGERPRINT, 16).root("")[: len(page_root)] != page_root


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "import numpy as np; from headrace.store.keys import ChunkHasher, salt_tag;"
        "k = ChunkHasher('ab' * 32, 8).extend([], np.arange(24, dtype=np.int32), 's\\u00e9');"
        "print(b''.join(k).hex(), salt_tag('s\\u00e9').hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[0]
        for seed in ("1", "2")
    }
    here = ChunkHasher(FINGERPRINT, 8).extend([], np.arange(24, dtype=np.int32), "s\u00e9")
    assert outputs == {b"".join(here).hex()}
    # Written down once: keys on disk must still be found by later versions.
    assert here[0].hex() == "0d36c78664168407466d5da740c29ca50eae0f13de68d5430c7c54e205f2567c"


def test_salt_tags() -> None:
    assert salt_tag("") == bytes(8)
    assert len({salt_tag(salt) for salt in ("", "a", "b", "aa")}) == 4
