"""One tier, several processes: one owner at a time, whoever is killed, stopped or talks rubbish."""

import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from parts_world import PART_BYTES, content, load, part_id, store

from headrace.store.catalog import messages
from headrace.store.catalog.election import ElectedCatalog, open_catalog
from headrace.store.catalog.ownership import MAX_SOCKET_PATH, place_of, runtime_dir
from headrace.store.catalog.server import MAX_CLIENTS
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.memory import MemoryTier

CAPACITY = 20 * PART_BYTES
PATIENCE = 240.0


def until(what: Callable[[], Any], why: str) -> Any:
    """Wait for a state that other processes bring about."""
    deadline, never = time.monotonic() + PATIENCE, threading.Event()
    while not (got := what()):
        assert time.monotonic() < deadline, why
        never.wait(0.005)
    return got


class Worker:
    def __init__(self, folder: Path, mode: str, seed: int = 0) -> None:
        script = Path(__file__).with_name("catalog_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(CAPACITY), mode, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self.lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):  # cut short by a kill
                self.lines.put(json.loads(line))

    def next(self, after: float = 0.0) -> dict[str, Any]:
        """The next line that was written after that moment."""
        while True:
            line = self.lines.get(timeout=PATIENCE)
            if line["at"] > after:
                return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0
        while not (line := self.next()).get("end"):
            pass
        return line


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(mode: str = "churn", seed: int = 0) -> Worker:
        workers.append(Worker(tmp_path, mode, seed))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
        worker.process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., ElectedCatalog]]:
    catalogs: list[ElectedCatalog] = []

    def opened(**options: Any) -> ElectedCatalog:
        catalogs.append(open_catalog(DirTier(tmp_path, CAPACITY), **options))
        return catalogs[-1]

    yield opened
    for catalog in catalogs:
        catalog.close()


def save(catalog: ElectedCatalog, tier: DirTier, number: int) -> bool:
    part = part_id(number)
    if not catalog.reserve(part, PART_BYTES, 1.0):
        return False
    store(tier, part)
    catalog.publish(part)
    return True


def bytes_in(folder: Path) -> int:
    """Bytes of all parts, those being written included; call it while nobody writes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix in (".kv", ".part"))


def owner_pid(tier: DirTier) -> int:
    try:
        return int(json.loads((tier.folder / ".lock").read_bytes())["pid"])
    except ValueError:  # nobody has announced himself yet
        return 0


def stop(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{worker.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "a stopped process stops")


def frozen_bytes(folder: Path, workers: list[Worker]) -> int:
    for worker in workers:
        stop(worker)
    found = bytes_in(folder)
    for worker in workers:
        os.kill(worker.pid, signal.SIGCONT)
    return found


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_two_processes_share_one_tier(
    tmp_path: Path, start: Callable[..., Worker], opened: Callable[..., ElectedCatalog]
) -> None:
    workers = [start(seed=1), start(seed=2)]
    for worker in workers:
        for _ in range(20):
            worker.next()
        assert frozen_bytes(tmp_path, workers) <= CAPACITY
    ends = [worker.end() for worker in workers]
    assert [end["wrong"] for end in ends] == [0, 0]
    assert all(end["found"] > 0 for end in ends)
    catalog = opened()
    usage = catalog.usage()
    assert bytes_in(tmp_path) == usage.used == usage.parts * PART_BYTES <= CAPACITY


def test_each_finds_what_the_other_published(tmp_path: Path, opened: Callable[..., ElectedCatalog]) -> None:
    tier = DirTier(tmp_path, CAPACITY)
    owner, first, second = opened(), opened(), opened()
    assert [catalog.owner for catalog in (owner, first, second)] == [True, False, False]
    for number, catalog in enumerate((owner, first, second)):
        assert save(catalog, tier, number)
        assert not catalog.reserve(part_id(number), PART_BYTES, 1.0)
    keys = [part_id(number).key for number in range(4)]
    for catalog in (owner, first, second):
        assert catalog.find(keys) == [(part_id(number).range,) for number in range(3)]
        assert catalog.usage() == owner.usage()
    first.drop(part_id(1))
    assert len(second.find(keys)) == 1
    assert first.lease(keys, "one", 60.0) == 4
    assert second.lease(keys, "two", 60.0) == 0
    assert owner.leased(keys, "two") == [True] * 4
    assert second.leased(keys, "one") == [False] * 4
    first.release(keys[:2], "one")
    assert second.leased(keys, "two") == [False, False, True, True]
    first.close()
    until(lambda: not any(second.leased(keys, "two")), "leases end with the connection")


@pytest.mark.timeout(600)
def test_killed_owners_are_replaced_ten_times_under_load(tmp_path: Path, start: Callable[..., Worker]) -> None:
    tier = DirTier(tmp_path, CAPACITY)
    workers = {worker.pid: worker for worker in (start(seed=i) for i in range(3))}
    for worker in workers.values():
        worker.next()
    waits = []
    for turn in range(10):
        pid = until(lambda: (pid := owner_pid(tier)) in workers and pid, "somebody owns the tier")
        for worker in workers.values():
            worker.next(time.monotonic() if turn % 2 else 0.0)
        killed_at = time.monotonic()
        workers.pop(pid).kill()
        until(lambda: owner_pid(tier) in workers, "one of the others takes over")
        taken_at = time.monotonic()
        for worker in workers.values():
            while not (line := worker.next(taken_at)).get("saved"):
                pass
            waits.append(line["at"] - killed_at)
        assert frozen_bytes(tmp_path, list(workers.values())) <= CAPACITY + PART_BYTES
        assert sum(path.suffix == ".part" for path in (tier.folder / "writing").iterdir()) <= len(workers)
        new = start(seed=100 + turn)
        workers[new.pid] = new
    for worker in workers.values():
        while not worker.next(killed_at).get("found"):
            pass
    ends = [worker.end() for worker in workers.values()]
    assert [end["wrong"] for end in ends] == [0, 0, 0]
    assert bytes_in(tmp_path) <= CAPACITY
    print(f"saved again after a kill: median {sorted(waits)[len(waits) // 2]:.2f} s, worst {max(waits):.2f} s")


def test_a_killed_clients_room_and_leases_come_back(
    tmp_path: Path, start: Callable[..., Worker], opened: Callable[..., ElectedCatalog]
) -> None:
    owner = opened()
    client = start("hold")
    said = client.next()
    assert (said["granted"], said["leased"], said["owner"]) == (True, 1, False)
    key = part_id(0).key
    assert owner.usage().used == CAPACITY
    assert not owner.reserve(part_id(1), PART_BYTES, 1.0)
    assert owner.leased([key], "me") == [True]
    assert bytes_in(tmp_path) > 0
    client.kill()
    until(lambda: owner.usage().used == 0, "its room comes back")
    assert owner.leased([key], "me") == [False]
    assert bytes_in(tmp_path) == 0, "and nothing of it is left lying about"
    assert owner.reserve(part_id(0), CAPACITY, 1.0)


def test_a_killed_owner_with_a_forked_child_is_replaced(
    start: Callable[..., Worker], opened: Callable[..., ElectedCatalog]
) -> None:
    parent = start("fork")
    child = parent.next()["child"]
    try:
        catalog = opened()
        assert not catalog.owner
        parent.kill()
        until(lambda: catalog.find([part_id(0).key]) == [] and catalog.owner, "the child does not hold the lock")
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_silent_owner_costs_one_deadline_and_no_exception(
    tmp_path: Path, start: Callable[..., Worker], opened: Callable[..., ElectedCatalog]
) -> None:
    owner = start(seed=3)
    owner.next()
    catalog = opened()
    assert not catalog.owner
    until(lambda: catalog.usage().parts, "it answers")
    stop(owner)
    try:
        assert catalog.find([part_id(0).key]) == []
        assert not catalog.known
        calls = 200
        started = time.monotonic()
        for _ in range(calls):
            assert catalog.find([part_id(0).key]) == []
            assert not catalog.reserve(part_id(1000), PART_BYTES, 1.0)
            assert catalog.lease([part_id(0).key], "me", 1.0) == 1
            assert catalog.leased([part_id(0).key], "me") == [False]
            assert catalog.usage().parts
            catalog.drop(part_id(1000))
        assert time.monotonic() - started < calls * 0.25
    finally:
        os.kill(owner.pid, signal.SIGCONT)
    until(lambda: catalog.known and catalog.reserve(part_id(1000), PART_BYTES, 1.0), "it answers again")
    catalog.withdraw(part_id(1000))
    assert owner.end()["wrong"] == 0


def test_a_clean_hand_over_keeps_what_is_being_written(tmp_path: Path, opened: Callable[..., ElectedCatalog]) -> None:
    tier = DirTier(tmp_path, CAPACITY)
    owner, heir, third = opened(), opened(), opened()
    assert save(owner, tier, 0)
    assert all(heir.reserve(part_id(number), PART_BYTES, 1.0) for number in (1, 2, 3))
    assert third.reserve(part_id(4), PART_BYTES, 1.0)
    owner.close()
    until(lambda: (heir.owner or third.owner) and heir.known and third.known, "there is a new owner")
    assert heir.owner != third.owner
    until(lambda: heir.usage().used == 5 * PART_BYTES, "room that was granted still counts")
    assert len(heir.find([part_id(0).key])) == 1
    for catalog, number in ((heir, 1), (heir, 2), (third, 4)):
        store(tier, part_id(number))
        catalog.publish(part_id(number))
    heir.withdraw(part_id(3))
    assert third.usage().used == 4 * PART_BYTES
    assert len(third.find([part_id(number).key for number in (0, 1, 2, 4)])) == 4
    until(lambda: third.reserve(part_id(5), PART_BYTES, 1.0), "after the grace there is room for new parts")
    third.withdraw(part_id(5))
    heir.check()
    third.check()


def test_what_was_sealed_while_there_was_no_owner_is_published_later(
    tmp_path: Path, start: Callable[..., Worker], opened: Callable[..., ElectedCatalog]
) -> None:
    tier = DirTier(tmp_path, CAPACITY)
    owner = start("fork")
    child = owner.next()["child"]
    catalog = opened()
    assert catalog.reserve(part_id(0), PART_BYTES, 1.0)
    stop(owner)
    assert catalog.find([]) == []
    assert not catalog.known
    store(tier, part_id(0))
    catalog.publish(part_id(0))
    os.kill(owner.pid, signal.SIGCONT)
    until(lambda: catalog.find([part_id(0).key]), "the owner hears of it when it is back")
    catalog.drop(part_id(0))
    until(lambda: catalog.reserve(part_id(0), PART_BYTES, 1.0), "and it can be written anew")
    owner.kill()
    os.kill(child, signal.SIGKILL)


def garbage() -> list[bytes]:
    good = messages.frame(messages.AskUsage())
    return [
        b"\x00",
        os.urandom(4096),
        struct.pack(">I", 0),
        struct.pack(">I", 0xFFFFFFFF) + b"x" * 100,
        struct.pack(">I", messages.MAX_REQUEST_BYTES) + b"\xc1" * 70000,
        struct.pack(">I", 64) + os.urandom(64),
        good + good,
        good[:-1] + b"\x00",
        messages.frame(messages.Reserve(part_id(0)._replace(key=b"short"), 1, 1.0)),
        messages.frame(messages.Reserve(part_id(0), 1 << 60, 1.0)),
        messages.frame(messages.Reserve(part_id(0), 1, float("nan"))),
        messages.frame(messages.Find([b"x" * 32] * (messages.MAX_KEYS + 1))),
        messages.frame(messages.Lease([b"x" * 32], "h" * 5000, 1.0)),
    ]


def test_a_flood_of_garbage_does_no_harm(tmp_path: Path, opened: Callable[..., ElectedCatalog]) -> None:
    tier = DirTier(tmp_path, CAPACITY)
    owner, client = opened(call_timeout=30.0), opened(call_timeout=30.0)
    for number in range(8):
        assert save(client, tier, number)
    address = str(tier.folder / ".socket")
    over = threading.Event()
    dropped = [0]

    def flood(offset: int) -> None:
        kinds = garbage()
        turn = offset
        while not over.is_set():
            turn += 1
            with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(address)
                connection.sendall(kinds[turn % len(kinds)])
                if turn % 3:
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
                    dropped[0] += 1

    threads = [threading.Thread(target=flood, args=(i,)) for i in range(3)]
    idle = []
    for thread in threads:
        thread.start()
    keys = [part_id(number).key for number in range(8)]
    for _ in range(MAX_CLIENTS + 40):
        idle.append(socket.socket(socket.AF_UNIX))
        idle[-1].connect(address)
        assert len(client.find(keys)) == 8
    for number in range(8, 30):
        assert save(client, tier, number)
    until(lambda: dropped[0] > 100, "the flood runs")
    over.set()
    for thread in threads:
        thread.join()
    for connection in idle:
        connection.close()
    owner.check()
    usage = client.usage()
    assert usage.used == bytes_in(tmp_path) == CAPACITY
    assert usage.parts == 20
    assert load(tier, part_id(29)) == content(part_id(29))


def test_a_client_that_does_not_read_its_answers_holds_nobody_up(opened: Callable[..., ElectedCatalog]) -> None:
    owner, client = opened(), opened(call_timeout=30.0)
    place = place_of(owner._tier)
    assert place is not None
    deaf = []
    for _ in range(20):
        deaf.append(socket.socket(socket.AF_UNIX))
        deaf[-1].connect(str(place.sockets[0]))
        deaf[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf[-1].sendall(messages.frame(messages.Leased([b"x" * 32] * messages.MAX_KEYS, "deaf")))
    assert client.leased([b"x" * 32] * 3 * messages.MAX_KEYS, "me") == [False] * 3 * messages.MAX_KEYS
    for connection in deaf:
        connection.close()


def test_a_removed_folder_is_owned_again(tmp_path: Path, opened: Callable[..., ElectedCatalog]) -> None:
    tier = DirTier(tmp_path, CAPACITY)
    owner, client = opened(), opened()
    assert save(owner, tier, 0)
    rmtree(tier.folder)
    until(
        lambda: owner.usage().parts == 0 and (owner.owner != client.owner) and owner.known and client.known,
        "one owns it",
    )
    until(lambda: save(client, tier, 1), "and it works")
    assert len(owner.find([part_id(1).key])) == 1
    assert (tier.folder / ".lock").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_gone_for_good_is_a_tier_without_parts(tmp_path: Path) -> None:
    base = tmp_path / "mount"
    tier = DirTier(base, CAPACITY)
    catalog = open_catalog(tier)
    assert save(catalog, tier, 0)
    base.rename(tmp_path / "gone")
    base.touch()  # nothing can be made here
    until(lambda: not catalog.known, "the owner notices")
    assert catalog.find([part_id(0).key]) == []
    assert not catalog.reserve(part_id(1), PART_BYTES, 1.0)
    base.unlink()
    (tmp_path / "gone").rename(base)
    until(lambda: len(catalog.find([part_id(0).key])) == 1, "it is back")
    catalog.close()


def test_a_long_path_has_its_socket_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * MAX_SOCKET_PATH)
    tiers = [DirTier(deep, CAPACITY) for _ in range(2)]
    owner, client = (open_catalog(tier) for tier in tiers)
    assert owner.owner
    assert not client.owner
    assert save(client, tiers[1], 0)
    assert len(owner.find([part_id(0).key])) == 1
    address = Path(json.loads((tiers[0].folder / ".lock").read_bytes())["socket"])
    assert address.parent == runtime_dir()
    client.close()
    owner.close()
    assert not address.exists()


def test_a_cluster_tier_has_one_owner_on_this_node(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    tiers = [DirTier(tmp_path / "shared", CAPACITY, scope="cluster") for _ in range(2)]
    owner, client = (open_catalog(tier) for tier in tiers)
    assert [owner.owner, client.owner] == [True, False]
    assert save(client, tiers[1], 0)
    assert len(owner.find([part_id(0).key])) == 1
    assert not (tiers[0].folder / ".lock").exists()
    assert {path.suffix for path in (short_path / "headrace").iterdir()} == {".lock", ".sock"}
    client.close()
    owner.close()


def test_a_runtime_folder_of_somebody_else_is_refused(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (short_path / "headrace").symlink_to(short_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        runtime_dir()
    (short_path / "headrace").unlink()
    (short_path / "headrace").mkdir(0o755)
    (short_path / "headrace").chmod(0o755)
    with pytest.raises(PermissionError):
        runtime_dir()


def test_a_memory_tier_is_shared_too(tmp_path: Path) -> None:
    tiers = [MemoryTier("memory", CAPACITY, "store", root=tmp_path) for _ in range(2)]
    owner, client = (open_catalog(tier) for tier in tiers)
    assert client.reserve(part_id(0), PART_BYTES, 1.0)
    store(tiers[1], part_id(0))
    client.publish(part_id(0))
    assert len(owner.find([part_id(0).key])) == 1
    owner.close()
    client.close()


def test_finding_a_thousand_chunks_takes_milliseconds_at_most(opened: Callable[..., ElectedCatalog]) -> None:
    owner, client = opened(), opened()
    parts = [part_id(number) for number in range(1000)]
    for part in parts:
        assert client.reserve(part, 4, 1.0)
        client.publish(part)
    keys = [part.key for part in parts]
    for name, catalog in (("local", owner), ("remote", client)):
        times = []
        for _ in range(30):
            started = time.perf_counter()
            assert len(catalog.find(keys)) == 1000
            times.append(time.perf_counter() - started)
        print(f"{name}: {sorted(times)[15] * 1e6:.0f} us for 1,000 keys")
        assert min(times) < 0.01


def test_calls_of_many_threads_get_their_own_answers(tmp_path: Path, opened: Callable[..., ElectedCatalog]) -> None:
    tier = DirTier(tmp_path, CAPACITY)
    opened()
    client = opened(call_timeout=60.0)
    for number in range(10):
        assert save(client, tier, number)
    wrong: list[int] = []

    def work(number: int) -> None:
        keys = [part_id(i).key for i in range(number, 12)]
        for _ in range(100):
            if len(client.find(keys)) != 10 - number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
