import math
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from heavy_saves import CAPACITY, PART, SHAPE, WHOLE, content, open_store

from headrace.store.load import records_in
from headrace.store.maintenance import Inspector, verify
from headrace.store.part import PartId


def kill_rounds(folder: Path, rounds: int) -> None:
    """Kill a saving process at a random moment, again and again: what is visible afterwards is right."""
    found = 0
    for number in range(rounds):
        command = [sys.executable, str(Path(__file__).with_name("heavy_saves.py")), str(folder), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "saving\n"
            time.sleep(random.Random(number).uniform(0.0, 0.4))  # the random moment
            process.kill()
        store = open_store(folder)  # its scan also clears up
        for tier, catalog in zip(store.tiers, store._catalogs):
            result = verify(tier, catalog)
            assert (result.wrong, result.unreadable) == ([], [])
            assert result.nbytes <= CAPACITY + PART
            assert catalog.usage().used == result.nbytes
            assert not list(tier.folder.rglob("*.part"))  # type: ignore[attr-defined]
            with Inspector(tier) as inspector:
                for part in inspector.parts():
                    found += 1
                    check(store, part.scanned.part)
        store.close()
    assert found > rounds


def check(store, part: PartId) -> None:  # type: ignore[no-untyped-def]
    """The part holds what its key says."""
    seen = set()

    def deliver(chunk: int, of: PartId, first: int, last: int, records: memoryview) -> None:
        for layer, record in records_in(first, last, records, 4 * math.prod(SHAPE)):
            np.testing.assert_array_equal(np.frombuffer(record, np.float32).reshape(SHAPE), content(of.key, layer))
            seen.add(layer)

    store.load(store.lookup([part.key], WHOLE), WHOLE, deliver).wait_all()
    assert seen == set(WHOLE.layers)


def test_a_writer_killed_at_random_leaves_nothing_wrong(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 3)


@pytest.mark.slow
def test_a_writer_killed_thirty_times_leaves_nothing_wrong(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 30)
