import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from parts_world import PART_BYTES, POOL, content, filled, load, part_id, store

from headrace.core.errors import ConfigError
from headrace.store.layout import ALIGNMENT
from headrace.store.tiers import writer as writer_module
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.files import FileTier
from headrace.store.tiers.memory import MemoryTier
from headrace.store.tiers.tier import PartMissing, TierError, TierFull, put_all

GIB = 1 << 30


@pytest.fixture(params=["dir", "memory"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileTier]:
    made: FileTier
    if request.param == "dir":
        made = DirTier(tmp_path / "tier", GIB)
        yield made
    else:
        memory = MemoryTier("memory", 1 << 20, f"test-{os.getpid()}")
        made = memory
        yield made
        memory.remove_all()
        assert not memory.folder.exists()
    assert POOL.in_use == 0
    assert made.scope == "node"


def files_in(tier: FileTier) -> list[Path]:
    return [path for path in tier.folder.rglob("*") if path.is_file()]


def test_what_is_sealed_can_be_read_from_any_aligned_offset(tier: FileTier) -> None:
    part = part_id(1)
    store(tier, part)
    assert load(tier, part) == content(part)
    assert load(tier, part, 2 * ALIGNMENT, ALIGNMENT) == content(part)[2 * ALIGNMENT : 3 * ALIGNMENT]
    tier.delete(part)
    tier.delete(part)
    with pytest.raises(PartMissing, match=part.name):
        load(tier, part)


def test_nothing_is_visible_before_the_seal_nor_after_an_abort(tier: FileTier) -> None:
    part = part_id(1)
    with filled(content(part)) as data:
        writer = tier.create(part, PART_BYTES)
        writer.put(0, data)
        with pytest.raises(PartMissing):
            load(tier, part)
        assert list(tier.scan()) == []  # and the scan leaves a living writer's file alone
        writer.seal()
        writer.abort()
        assert load(tier, part) == content(part)
        for call in (writer.seal, lambda: writer.put(0, data)):
            with pytest.raises(TierError, match="sealed"):
                call()
        other = part_id(2)
        with tier.create(other, PART_BYTES) as writer:
            writer.put(0, data)
        writer.abort()
        with pytest.raises(PartMissing):
            load(tier, other)
    assert [found.part for found in tier.scan()] == [part]
    assert len(files_in(tier)) == 1


def test_a_part_with_a_hole_is_not_published(tier: FileTier) -> None:
    part = part_id(1)
    with filled(content(part)) as data:
        writer = tier.create(part, PART_BYTES)
        writer.put(ALIGNMENT, data[ALIGNMENT:])
        with pytest.raises(TierError, match=f"lacks {ALIGNMENT} bytes"):
            writer.seal()
        for offset, nbytes in ((1, ALIGNMENT), (0, 100), (PART_BYTES, ALIGNMENT)):
            with tier.create(part, PART_BYTES) as writer, pytest.raises(TierError, match="aligned"):
                writer.put(offset, data[:nbytes])
    assert files_in(tier) == []


def test_two_writers_of_one_part_do_not_disturb_each_other(tier: FileTier) -> None:
    part = part_id(1)
    with filled(content(part)) as data, filled(bytes(PART_BYTES)) as zeros:
        first, second = tier.create(part, PART_BYTES), tier.create(part, PART_BYTES)
        first.put(0, zeros)
        second.put(0, data)
        first.seal()
        second.seal()
    assert load(tier, part) == content(part)
    assert len(files_in(tier)) == 1


def test_put_all_writes_pieces_in_order(tier: FileTier) -> None:
    part = part_id(1)
    with filled(content(part)) as data, tier.create(part, PART_BYTES) as writer:
        put_all(writer, [data[:ALIGNMENT], data[ALIGNMENT:]])
    assert load(tier, part) == content(part)


def test_a_scan_finds_all_parts_and_their_sizes_and_nothing_else(tier: FileTier) -> None:
    parts = {part_id(number): (number + 1) * ALIGNMENT for number in range(20)}
    for part, nbytes in parts.items():
        store(tier, part, nbytes)
    somewhere = Path(tier._files.file(part_id(0))).parent
    shutil.copy(tier._files.file(part_id(0)), somewhere / "notes.txt")
    shutil.copy(tier._files.file(part_id(1)), somewhere / part_id(99).name)  # in another part's folder
    link = Path(tier._files.file(part_id(50)))
    link.parent.mkdir(parents=True)
    link.symlink_to(tier._files.file(part_id(0)))
    before = 1_000_000_000.0
    os.utime(tier._files.file(part_id(3)), (before, before))
    found = {entry.part: entry for entry in tier.scan()}
    assert {part: entry.nbytes for part, entry in found.items()} == parts
    assert found[part_id(3)].used_at == before
    load(tier, part_id(3), ALIGNMENT, ALIGNMENT)
    assert {e.part: e.used_at for e in tier.scan()}[part_id(3)] == before
    load(tier, part_id(3), 0, ALIGNMENT)
    assert {e.part: e.used_at for e in tier.scan()}[part_id(3)] > before
    with pytest.raises(TierError, match="symbolic links"):
        load(tier, part_id(50), 0, ALIGNMENT)


def test_folders_and_files_are_the_users_alone(tier: FileTier) -> None:
    store(tier, part_id(1))
    with tier.create(part_id(2), PART_BYTES):
        for path in (tier.folder, *tier.folder.rglob("*")):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path
    os.chmod(tier.folder, 0o755)
    list(tier.scan())
    assert stat.S_IMODE(tier.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("kept", [0, 100, ALIGNMENT, ALIGNMENT + 7, PART_BYTES - 1])
def test_a_truncated_part_is_an_error(tier: FileTier, kept: int) -> None:
    part = part_id(1)
    store(tier, part)
    os.truncate(tier._files.file(part), kept)
    with pytest.raises(TierError, match="cut short") as caught:
        load(tier, part)
    assert not isinstance(caught.value, PartMissing)


WRITER = """
import itertools, sys
from pathlib import Path
sys.path.append(sys.argv[3])
from parts_world import PART_BYTES, filled, content, part_id
from headrace.store.tiers.dir import DirTier
from headrace.store.tiers.memory import MemoryTier
where = Path(sys.argv[2])
tier = DirTier(where, 1 << 30) if sys.argv[1] == "dir" else MemoryTier("memory", 1 << 20, where.name)
for number in itertools.count():
    part = part_id(number % 7)
    with filled(content(part)) as data, tier.create(part, PART_BYTES) as writer:
        for at in range(0, PART_BYTES, 4096):
            writer.put(at, data[at : at + 4096])
        if sys.argv[4] == "stop" and number == 2:
            print("written", flush=True)
            sys.stdin.read()
        writer.seal()
    print("sealed", flush=True)
"""


def start_writer(tier: FileTier, how: str) -> "subprocess.Popen[bytes]":
    arguments = ("memory", tier.folder) if isinstance(tier, MemoryTier) else ("dir", tier.folder.parent)
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *map(str, arguments), str(Path(__file__).parent), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def kill(child: "subprocess.Popen[bytes]") -> None:
    assert child.stdin
    assert child.stdout
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


def test_a_writer_killed_at_any_moment_leaves_nothing_visible(tier: FileTier) -> None:
    for round_ in range(4):
        child = start_writer(tier, "run")
        assert child.stdout
        for _ in range(1 + 5 * round_):
            assert child.stdout.readline() == b"sealed\n"
        kill(child)
        found = [entry.part for entry in tier.scan()]
        assert os.listdir(tier.folder / "writing") == []
        assert found
        for part in found:
            assert load(tier, part) == content(part)
        assert len(files_in(tier)) == len(found)


def test_what_a_dead_writer_left_goes_and_what_a_living_one_writes_stays(tier: FileTier) -> None:
    child = start_writer(tier, "stop")
    assert child.stdout
    assert [child.stdout.readline() for _ in range(3)] == [b"sealed\n", b"sealed\n", b"written\n"]
    for _ in range(2):
        assert {entry.part for entry in tier.scan()} == {part_id(0), part_id(1)}
        assert len(os.listdir(tier.folder / "writing")) == 1
    kill(child)
    assert len(os.listdir(tier.folder / "writing")) == 1
    assert {entry.part for entry in tier.scan()} == {part_id(0), part_id(1)}
    assert os.listdir(tier.folder / "writing") == []


def test_a_folder_that_goes_away_is_an_error_and_comes_back(tmp_path: Path) -> None:
    base, away = tmp_path / "tier", tmp_path / "away"
    tier = DirTier(base, GIB)
    store(tier, part_id(1))
    with filled(content(part_id(2))) as data:
        writer = tier.create(part_id(2), PART_BYTES)
        writer.put(0, data)
        base.rename(away)
        for call in (
            writer.seal,
            lambda: load(tier, part_id(1)),
            lambda: tier.create(part_id(3), PART_BYTES),
            lambda: tier.delete(part_id(1)),
            lambda: list(tier.scan()),
        ):
            with pytest.raises(TierError) as caught:
                call()
            assert not isinstance(caught.value, PartMissing)
    assert not base.exists()
    away.rename(base)
    assert load(tier, part_id(1)) == content(part_id(1))
    store(tier, part_id(2))
    assert {entry.part for entry in tier.scan()} == {part_id(1), part_id(2)}
    assert os.listdir(tier.folder / "writing") == []
    shutil.rmtree(tier.folder)  # emptied by hand: its base is there, so it is made again
    store(tier, part_id(2))
    assert load(tier, part_id(2)) == content(part_id(2))


def test_nothing_is_written_below_a_bare_mount_point(tmp_path: Path) -> None:
    base = tmp_path / "tier"
    tier = DirTier(base, GIB)
    shutil.rmtree(tier.folder)
    tier._files._device += 1  # what it looks like when the disk was unmounted: another file system is there
    with pytest.raises(TierError, match="mounted"):
        tier.create(part_id(1), PART_BYTES)
    assert list(base.iterdir()) == []


def test_a_crowd_of_threads(tier: FileTier) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(10):
                part = part_id(round_ % 3)
                store(tier, part)
                assert load(tier, part) == content(part)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(files_in(tier)) == 3
    assert {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }.isdisjoint({str(path) for path in files_in(tier)})


def cached(path: str) -> bool:
    """Whether the first page of a file is in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(ALIGNMENT)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


@pytest.mark.parametrize("direct", [True, False])
def test_the_page_cache_is_left_alone(tmp_path: Path, direct: bool) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True).stdout
    if "ext" not in kind and "xfs" not in kind:
        pytest.skip(f"it is not known how {kind.strip()} caches")
    tier = DirTier(tmp_path, GIB)
    assert tier.direct
    if not direct:
        tier = FileTier("dir", tier._files, GIB, "node", 4, direct=False, forget=True)
    part = part_id(1)
    path = tier._files.file(part)
    store(tier, part)
    assert load(tier, part) == content(part)
    # Each is asked once only: asking may make the system read ahead.
    assert not cached(path)
    store(tier, part_id(2))
    assert not cached(tier._files.file(part_id(2)))
    assert Path(path).read_bytes() == content(part)
    assert cached(path)


def limited(tmp_path: Path, program: str) -> str:
    """What a process prints that may make no file larger than 8 KiB."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192));"
        f"sys.path.append({str(Path(__file__).parent)!r});"
        "from parts_world import *; from pathlib import Path;"
        "from headrace.store.tiers.dir import DirTier; from headrace.store.tiers.tier import *;"
        f"tier = DirTier(Path({str(tmp_path)!r}), 1 << 30)\n{program}"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_write_that_the_system_refuses_is_a_tier_error_and_leaves_nothing(tmp_path: Path) -> None:
    program = "try:\n    store(tier, part_id(1))\nexcept TierError as error:\n    print(type(error).__name__, error)"
    assert "File too large" in limited(tmp_path, program)
    assert files_in(DirTier(tmp_path, GIB)) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_seen_before_anything_is_written(
    tier: FileTier, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writer_module.os, "posix_fallocate", full)
    with pytest.raises(TierFull, match=tier.name):
        tier.create(part_id(1), PART_BYTES)
    monkeypatch.undo()
    assert files_in(tier) == []


def test_more_room_than_there_is_cannot_be_taken(tier: FileTier) -> None:
    room = os.statvfs(tier.folder)
    with pytest.raises(TierFull):
        tier.create(part_id(1), room.f_blocks * room.f_frsize + ALIGNMENT)
    assert files_in(tier) == []


def test_file_systems_that_cannot_take_room_are_asked_how_much_there_is(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "")

    monkeypatch.setattr(writer_module.os, "posix_fallocate", cannot)
    store(tier, part_id(1))
    assert load(tier, part_id(1)) == content(part_id(1))
    with pytest.raises(TierFull):
        tier.create(part_id(2), 1 << 60)
    assert len(files_in(tier)) == 1


def test_folders_of_others_and_wrong_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give another path"):
        DirTier(tmp_path / "file", GIB)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "headrace-kv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder"):
        DirTier(tmp_path, GIB)
    if os.geteuid() == 0:
        (tmp_path / "headrace-kv").unlink()
        (tmp_path / "headrace-kv").mkdir()
        os.chown(tmp_path / "headrace-kv", 12345, 12345)
        with pytest.raises(ConfigError, match="12345"):
            DirTier(tmp_path, GIB)


def test_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tier m: .*1024TiB.* more than"):
        MemoryTier("m", 1 << 50, f"test-{os.getpid()}-large")
    shutil.rmtree(Path(f"/dev/shm/headrace-{os.geteuid()}/test-{os.getpid()}-large"))
    with pytest.raises(ConfigError, match="no shared memory"):
        MemoryTier("m", 1 << 20, "x", root=tmp_path / "none")


def test_stores_of_one_name_share_memory_and_others_do_not(tmp_path: Path) -> None:
    tiers = [MemoryTier("m", 1 << 20, name, root=tmp_path) for name in ("a", "a", "b")]
    store(tiers[0], part_id(1))
    assert load(tiers[1], part_id(1)) == content(part_id(1))
    with pytest.raises(PartMissing):
        load(tiers[2], part_id(1))
