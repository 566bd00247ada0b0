"""Servers killed at random moments while they write: whatever lies there afterwards is right, and not too much."""

import random
import threading
from pathlib import Path

import pytest
from soak_world import PART, Load, Right, Server, answers, files, serving, verify, verify_by_command

from headrace.store.tiers.files import FileTier
from headrace.store.tiers.memory import MemoryTier
from headrace.store.tiers.spec import build_tiers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

ROUNDS = 30
MEMORY = "memory:1MiB"


def test_thirty_kills_under_heavy_writes(tmp_path: Path, home: Path, model: Path, right: Right) -> None:
    folder = tmp_path / "tier"
    # Slow to write, so that there is always something half written.
    specs = (MEMORY, f"throttled:100MB/s,write=2MB/s:dir:{folder}:2MiB")
    flags = [word for spec in specs for word in ("--tier", spec)]
    tiers: list[FileTier] = build_tiers([MEMORY, f"dir:{folder}:2MiB"], home)  # type: ignore[assignment]
    rng = random.Random(7)
    answered = cached = half_written = 0
    seen: set[int] = set()
    rounds_that_wrote = 0
    try:
        for number in range(ROUNDS):
            server = Server(model, home, *flags)
            try:
                server.ready()
                load = Load(server, right, seed=number)
                threading.Event().wait(rng.uniform(0.0, 1.5))  # the random moment
                load.check()
                load.ending = True
            finally:
                # All at once, the engine alone, or the server alone: the rest has to follow.
                whom = rng.choice(["all", "all", "engine", "server"])
                server.kill({"all": None, "engine": server.worker(), "server": server.process.pid}[whom])
            load.stop()
            server.http.close()
            load.check()
            answered, cached = answered + load.answered, cached + load.cached
            for tier in tiers:
                left = files(tier.folder)
                assert sum(left.values()) <= tier.capacity + PART
                half_written += len(list(tier.folder.rglob("*.part")))
                verify(tier)
            now = set(files(folder))
            rounds_that_wrote += bool(now - seen)
            seen = now
            if number % 10 == 9:
                row = verify_by_command(folder, "2MiB", home)
                assert (row["wrong"], row["unreadable"]) == ([], [])
                assert row["bytes"] <= 2 << 20
        with serving(model, home, *flags) as survivor:
            assert answers(survivor, list(right)) == right
        print(f"{answered} answers, {cached} tokens cached, {half_written} parts half written at a kill")
        assert answered > ROUNDS
        assert cached > 0
        assert half_written > 0
        assert rounds_that_wrote > ROUNDS / 2
        for tier in tiers:
            verify(tier)
    finally:
        for tier in tiers:
            if isinstance(tier, MemoryTier):
                tier.remove_all()
