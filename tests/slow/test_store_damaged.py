"""A server whose stored parts are damaged under its hands answers rightly and goes on."""

import contextlib
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from soak_world import Right, answers, await_true, held, loaded, serving, verify_by_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def flip(file: Path, others: list[Path], rng: random.Random) -> None:
    with file.open("r+b", buffering=0) as opened:
        at = rng.randrange(os.fstat(opened.fileno()).st_size)
        (byte,) = os.pread(opened.fileno(), 1, at)
        os.pwrite(opened.fileno(), bytes([byte ^ 1 << rng.randrange(8)]), at)


def truncate(file: Path, others: list[Path], rng: random.Random) -> None:
    os.truncate(file, rng.randrange(1, file.stat().st_size))


def empty(file: Path, others: list[Path], rng: random.Random) -> None:
    os.truncate(file, 0)


def delete(file: Path, others: list[Path], rng: random.Random) -> None:
    file.unlink()


def replace(file: Path, others: list[Path], rng: random.Random) -> None:
    copy = file.with_suffix(".copy")
    shutil.copyfile(rng.choice(others), copy)
    os.replace(copy, file)


DAMAGES = (flip, truncate, empty, delete, replace)


@contextmanager
def damaging(folder: Path) -> Iterator[Counter[str]]:
    """Damage random parts of a tier, one every few milliseconds; counts what was done."""
    stop, done, rng = threading.Event(), Counter[str](), random.Random(3)

    def work() -> None:
        while not stop.wait(0.005):
            parts = sorted(folder.rglob("*.kv"))
            if len(parts) > 1:
                damage: Callable[[Path, list[Path], random.Random], None] = rng.choice(DAMAGES)
                with contextlib.suppress(FileNotFoundError, ValueError):  # evicted meanwhile, or empty already
                    damage(rng.choice(parts), parts, rng)
                    done[damage.__name__] += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()


def test_damage_of_every_kind_under_load(tmp_path: Path, home: Path, model: Path, right: Right) -> None:
    folder = tmp_path / "tier"
    with serving(model, home, "--tier", f"dir:{folder}:16MiB") as server:
        with loaded(server, right, 1) as load:
            load.more(len(right))
            with damaging(folder) as done:
                await_true(lambda: all(done[kind.__name__] >= 20 for kind in DAMAGES), "every kind of damage")
                load.more(len(right))
                await_true(lambda: server.metrics()["store_wrong_parts"] > 20, "damage that was noticed")
            assert held(folder) <= 16 << 20
            load.more(1)
        assert answers(server, list(right)) == right
        counted = server.metrics()
        print(f"{load.answered} answers, {load.cached} tokens cached; damage {dict(done)}; ", end="")
        print({k: v for k, v in counted.items() if "wrong" in k or "loads" in k or "read_errors" in k})
        assert counted["store_loads_failed"] > 0
        # What nobody has read since is found beside the running server, and then everything is in order.
        verify_by_command(folder, "16MiB", home, "--repair")
        assert verify_by_command(folder, "16MiB", home)["wrong"] == []
        assert held(folder) <= server.tier("used")  # it still counts what was deleted and not asked for since
