"""A real small file system that fills up, and that is unmounted while threads read and write."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]

PROGRAM = """
import os, subprocess, sys, threading
from pathlib import Path
sys.path.append(sys.argv[2])
from parts_world import PART_BYTES, POOL, content, load, part_id, store
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.tier import PartMissing, TierError, TierFull

base, away = Path(sys.argv[1]) / "base", Path(sys.argv[1]) / "away"
base.mkdir()
away.mkdir()

def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)

mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", base)
tier = DirTier(base, 1 << 30)

stored = []
try:
    for number in range(1000):
        store(tier, part_id(number))
        stored.append(part_id(number))
except TierFull as error:
    assert "No space left" in str(error), error
assert 10 < len(stored) < 40, len(stored)
assert {found.part for found in tier.scan()} == set(stored)
assert os.listdir(tier.folder / "writing") == []
for part in stored[:5]:
    tier.delete(part)
del stored[:5]
store(tier, part_id(0))  # there is room again at once
stored.append(part_id(0))

started, stop, escaped = threading.Barrier(4), threading.Event(), []
failed = [threading.Semaphore(0) for _ in range(3)]

def work(number):
    started.wait()
    while not stop.is_set():
        try:
            if number != 1:
                assert load(tier, stored[number]) == content(stored[number])
            if number != 2:
                store(tier, part_id(1000))
        except TierError as error:
            assert not isinstance(error, (PartMissing, TierFull)), error
            failed[number].release()
        except BaseException as error:
            escaped.append(error)
            stop.set()

threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
for thread in threads:
    thread.start()
started.wait()
mount("--move", base, away)
for failures in failed:
    for _ in range(10):
        while not failures.acquire(timeout=1):
            assert not escaped, escaped
            assert list(base.iterdir()) == [], "written below the bare mount point"
assert list(base.iterdir()) == [], "written below the bare mount point"
mount("--move", away, base)
stop.set()
for thread in threads:
    thread.join()
assert not escaped, escaped
for part in stored:
    assert load(tier, part) == content(part)
tier.delete(part_id(1000))
store(tier, part_id(1000))
assert {found.part for found in tier.scan()} == {*stored, part_id(1000)}
assert os.listdir(tier.folder / "writing") == []
assert POOL.in_use == 0
print("all well")
"""


def test_a_disk_that_is_full_and_one_that_is_unmounted_under_load(tmp_path: Path) -> None:
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    found = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "all well\n"
