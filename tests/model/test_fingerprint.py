"""KV is shared only under the same fingerprint: it must change with whatever changes the numbers."""

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from families import save

from headrace.core.errors import ModelError
from headrace.core.paths import home
from headrace.model import fingerprint as module
from headrace.model.fingerprint import file_digest, weights_digest
from headrace.model.loader import load


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = home() / "kernels"
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    if compiled.is_dir():
        shutil.copytree(compiled, tmp_path / "home" / "kernels")


def test_same_everywhere_and_different_where_it_matters(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "one")
    base = load(folder, threads=1).shape.fingerprint
    assert len(base) == 64
    assert load(shutil.copytree(folder, tmp_path / "elsewhere"), threads=1).shape.fingerprint == base
    # A static rotary embedding does not care how long sequences may be.
    assert load(folder, threads=1, max_model_len=50).shape.fingerprint == base
    others = [load(folder, threads=1, dtype="bfloat16").shape.fingerprint]
    config = (folder / "config.json").read_text()
    assert '"rope_theta": 10000.0' in config
    (folder / "config.json").write_text(config.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    others.append(load(folder, threads=1).shape.fingerprint)
    (folder / "config.json").write_text(config)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    others.append(load(folder, threads=1).shape.fingerprint)
    assert len({base, *others}) == 4


def test_longrope_length_is_part_of_it(tmp_path: Path) -> None:
    folder = save("phi3-longrope", tmp_path)
    prints = {length: load(folder, threads=1, max_model_len=length).shape.fingerprint for length in (64, 128, 129, 512)}
    assert prints[64] == prints[128]
    assert prints[129] == prints[512]
    assert prints[128] != prints[129]


def test_digest_is_cached_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"x" * 5000)
    first = file_digest(file)
    records = list((home() / "digests").iterdir())
    assert len(records) == 1
    with monkeypatch.context() as patch:
        patch.setattr(module.hashlib, "file_digest", lambda *_: pytest.fail("computed again"))
        assert file_digest(file) == first
    records[0].write_text('{"identity": [1')
    assert file_digest(file) == first
    # The same size and time, but another file in its place (a rename): the inode tells.
    stat = file.stat()
    other = tmp_path / "b"
    other.write_bytes(b"y" * 5000)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, file)
    assert file_digest(file) != first


def test_order_and_split_of_files_matter(tmp_path: Path) -> None:
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    one.write_bytes(b"a")
    two.write_bytes(b"b")
    assert weights_digest([one, two]) == weights_digest([two, one])
    before = weights_digest([one, two])
    one.write_bytes(b"b")
    two.write_bytes(b"a")
    assert weights_digest([one, two]) != before


def _digest(path: str) -> str:
    return file_digest(Path(path))


def test_two_processes_at_once(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(os.urandom(1 << 20))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert len(set(pool.map(_digest, [str(file)] * 6))) == 1
    assert [record.suffix for record in (home() / "digests").iterdir()] == [".json"]


def test_file_that_changes_while_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"x" * 100)
    real = module.hashlib.file_digest

    def grows(stream, name):  # type: ignore[no-untyped-def]
        digest = real(stream, name)
        with file.open("ab") as more:
            more.write(b"more")
        return digest

    monkeypatch.setattr(module.hashlib, "file_digest", grows)
    with pytest.raises(ModelError, match="changed while it was read"):
        file_digest(file)
