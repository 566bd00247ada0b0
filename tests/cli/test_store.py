import json
from pathlib import Path

import numpy as np
import pytest
from cli_runs import headrace

from headrace.store.keys import salt_tag
from headrace.store.layout import KVLayout
from headrace.store.part import PartId, PartRange
from headrace.store.save import SaveSpec
from headrace.store.settings import StoreSettings
from headrace.store.store import KVStore
from headrace.store.tiers.dir import DirTier

LAYOUT = KVLayout("a model", layers=2, kv_heads=1, head_dim=16, dtype="float32", chunk_tokens=16)
WHOLE = PartRange(0, 2, 0, 1)
PART = LAYOUT.part_bytes(2, 1, 16)


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    """A server's store of two folders with four chunks, two of them under a salt."""
    tiers = [DirTier(tmp_path / name, 64 << 20) for name in ("a", "b")]
    made = KVStore(LAYOUT, tiers, StoreSettings(replication="all"))
    for salt in ("", "tenant"):
        for chunk, key in enumerate(made.keys(np.arange(32, dtype=np.int32), salt)):
            spec = SaveSpec(PartId(key, WHOLE), 16, chunk, 1.0, salt_tag(salt))
            save = made.save(spec, lambda layer, record: None)
            assert save is not None
            for layer in range(2):
                save.layer_ready(layer)
    assert made.flush(30)
    return made


def run(tmp_path: Path, *words: str, code: int = 0) -> list[dict]:  # type: ignore[type-arg]
    tiers = ",".join(f"dir:{tmp_path / name}:64MiB" for name in ("a", "b"))
    done = headrace("store", *words, "--json", home=tmp_path / "home", HEADRACE_TIER=tiers)
    assert done.returncode == code, done.stderr
    (rows,) = json.loads(done.stdout).values()
    return rows


def parts(store: KVStore) -> list[int]:
    return [tier.parts for tier in store.stats().tiers]


def test_stats_and_ls_beside_a_running_server_and_after_it(tmp_path: Path, store: KVStore) -> None:
    def look() -> None:
        assert [(row["parts"], row["used_bytes"]) for row in run(tmp_path, "stats")] == [(4, 4 * PART)] * 2
        listed = run(tmp_path, "ls")
        assert len(listed) == 8
        assert {row["tokens"] for row in listed} == {16}
        assert sorted(row["salt_tag"] for row in listed) == sorted([bytes(8).hex(), salt_tag("tenant").hex()] * 4)

    look()
    store.close()
    look()
    text = headrace("store", "ls", "--tier", f"dir:{tmp_path / 'a'}:1GiB", home=tmp_path / "home")
    assert "4 parts" in text.stdout


def test_purge_of_a_salt_takes_that_salt_and_the_server_knows(tmp_path: Path, store: KVStore) -> None:
    removed = run(tmp_path, "purge", "--salt", "tenant")
    assert [(row["removed"], row["freed_bytes"]) for row in removed] == [(2, 2 * PART)] * 2
    assert parts(store) == [2, 2]
    tokens = np.arange(32, dtype=np.int32)
    assert len(store.lookup(store.keys(tokens), WHOLE)) == 2
    assert store.lookup(store.keys(tokens, "tenant"), WHOLE) == []
    run(tmp_path, "purge")
    assert parts(store) == [0, 0]
    store.close()


def test_verify_finds_what_is_wrong_and_repairs_it_when_told(tmp_path: Path, store: KVStore) -> None:
    assert [(row["parts"], row["wrong"]) for row in run(tmp_path, "verify")] == [(4, [])] * 2
    files = sorted((tmp_path / "a").rglob("*.kv"))
    flipped = bytearray(files[0].read_bytes())
    flipped[-1] ^= 1
    files[0].write_bytes(flipped)
    files[1].write_bytes(files[1].read_bytes()[:-4096])
    files[2].write_bytes(files[3].read_bytes())
    first, second = run(tmp_path, "verify", code=1)
    assert len(first["wrong"]) == 3
    assert "checksum" in first["wrong"][0]
    assert "should have" in first["wrong"][1]
    assert "holds" in first["wrong"][2]
    assert (first["removed"], second["wrong"]) == (0, [])
    assert run(tmp_path, "verify", "--repair")[0]["removed"] == 3
    assert run(tmp_path, "verify")[0]["parts"] == 1
    assert parts(store) == [1, 4]
    store.close()


def test_gc_takes_what_is_old_and_what_dead_writers_left(tmp_path: Path, store: KVStore) -> None:
    store.close()
    assert [row["removed"] for row in run(tmp_path, "gc")] == [0, 0]
    left = next((tmp_path / "a").rglob("writing")) / "1-dead.part"
    left.write_bytes(bytes(4096))
    assert [row["removed"] for row in run(tmp_path, "gc", "--older-than", "1ms")] == [4, 4]
    assert not left.exists()
    assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gc", "--older-than", "soon"), "--older-than: 'soon' is not a duration such as 2d"),
        (("ls", "--tier", "dri:/x:1GiB"), "unknown tier 'dri:/x:1GiB' (did you mean dir?)"),
        (("stats", "--tier", "dir:/x"), "lacks a path or a size"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = headrace("store", *words, home=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
