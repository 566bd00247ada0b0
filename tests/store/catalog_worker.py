"""A process that uses a tier together with others: `catalog_worker.py FOLDER CAPACITY churn|hold|fork SEED`.

`churn` looks up, reads, checks, saves and drops parts until its standard input ends: one JSON line a save.
`hold` reserves all there is, writes half of it and waits. `fork` forks a child that waits, and waits.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from threading import Event, Thread

from parts_world import PART_BYTES, content, filled, load, part_id, store

from headrace.store.catalog.election import open_catalog
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.tier import PartMissing

NAMES = 64


def say(**what: object) -> None:
    print(json.dumps({"at": time.monotonic(), "pid": os.getpid(), **what}), flush=True)


def churn(tier: DirTier, seed: int, over: Event) -> None:
    rng = random.Random(seed)
    catalog = open_catalog(tier)
    found = wrong = 0
    say(owner=catalog.owner, saved=-1)
    while not over.is_set():
        part = part_id(rng.randrange(NAMES))
        if catalog.find([part.key]):
            try:
                wrong += load(tier, part) != content(part)
                found += 1
            except PartMissing:
                catalog.drop(part)
            if rng.random() < 0.1:
                catalog.drop(part)
        elif catalog.reserve(part, PART_BYTES, rng.random()):
            store(tier, part)
            catalog.publish(part)
            say(owner=catalog.owner, saved=part.name, found=found, wrong=wrong)
        else:
            over.wait(0.002)  # no owner for now, or somebody else writes it
    catalog.close()
    say(end=True, found=found, wrong=wrong)


def hold(tier: DirTier, over: Event) -> None:
    catalog = open_catalog(tier)
    part = part_id(0)
    granted = catalog.reserve(part, tier.capacity, 1.0)
    leased = catalog.lease([part.key], "worker", 600.0)
    with filled(content(part)) as data, tier.create(part, tier.capacity) as writer:
        writer.put(0, data)
        say(granted=granted, leased=leased, owner=catalog.owner)
        over.wait()


def fork(tier: DirTier, over: Event) -> None:
    catalog = open_catalog(tier)
    child = os.fork()
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    say(owner=catalog.owner, child=child)
    over.wait()


def main() -> None:
    folder, capacity, mode, seed = sys.argv[1:]
    tier = DirTier(Path(folder), int(capacity))
    over = Event()
    Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=mode != "churn").start()
    {"churn": lambda: churn(tier, int(seed), over), "hold": lambda: hold(tier, over), "fork": lambda: fork(tier, over)}[
        mode
    ]()


if __name__ == "__main__":
    main()
