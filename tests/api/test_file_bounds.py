"""What uploads may take, and what damaged, missing or vanishing files do to the others."""

import errno
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from batch_files import chat_line, jsonl, model_folder, upload
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from served import Served, serve_parrot

from headrace.api.content import asked_range
from headrace.api.errors import ApiError, as_api_error
from headrace.api.file_store import FileStore
from headrace.api.limits import FORM_BYTES
from headrace.api.upload import MAX_FIELDS, MAX_HEADERS, Form
from headrace.core.config import ServerConfig
from headrace.core.errors import InvalidRequest
from headrace.offline.jobs.errors import JobBusy, JobError

LINE = jsonl(chat_line("a", "la"))
FORM = {"content-type": "multipart/form-data; boundary=XX"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    config = ServerConfig(max_file_bytes=4 * MIB, max_files_bytes=8 * MIB)
    with serve_parrot(config, home=home, path=model_folder(home / "model")) as server:
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as client:
        yield client


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.client()


def part(name: str, content: bytes = b"", more: str = "") -> bytes:
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def error_of(answer: httpx.Response) -> dict[str, str]:
    error: dict[str, str] = answer.json()["error"]
    assert "\n" not in error["message"]
    return error


def test_parts_without_content_count(served: Served, http: httpx.Client) -> None:
    def parts(count: int) -> Iterator[bytes]:
        for i in range(count):
            yield part(f"{'n' * 1500}{i}")
        yield part("purpose", b"batch") + part("file", LINE, '; filename="a"') + b"--XX--\r\n"

    assert http.post("/v1/files", content=parts(MAX_FIELDS - 1), headers=FORM).status_code == 200
    refused = http.post("/v1/files", content=parts(2000), headers=FORM)
    assert refused.status_code == 400
    assert f"{MAX_FIELDS} fields" in error_of(refused)["message"]
    assert not list(served.state.files.folder.glob(".*"))


def test_what_stands_around_a_file_is_bounded(http: httpx.Client) -> None:
    long = part("purpose", b"batch", f'; x="{"a" * MAX_HEADERS}"') + b"--XX--\r\n"
    assert "headers" in error_of(http.post("/v1/files", content=long, headers=FORM))["message"]
    form = Form()
    for _ in range(MAX_HEADERS // 64):  # names that come in pieces are never held beyond the bound
        form._add_value(b"a" * 64)
    with pytest.raises(InvalidRequest):
        form._add_header(b"a")
    whole = part("purpose", b"batch") + part("file", LINE, '; filename="a"') + b"--XX--\r\n"
    refused = http.post("/v1/files", content=whole + b"x" * FORM_BYTES, headers=FORM)
    assert refused.status_code == 413
    boundary = {"content-type": f"multipart/form-data; boundary={'b' * 5000}"}
    assert http.post("/v1/files", content=b"x", headers=boundary).status_code == 400


def test_all_uploads_together_keep_to_the_capacity(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10)
    first, second = store.begin(), store.begin()
    store.take(first, 6)
    with pytest.raises(ApiError, match="10 bytes") as refused:
        store.take(second, 5)
    assert refused.value.status == 413
    store.take(second, 4)
    store.end(second)
    assert not second.exists()
    first.write_bytes(b"123456")
    made = store.publish(first, "a", "batch", None)
    store.end(first)
    third = store.begin()
    with pytest.raises(ApiError):
        store.take(third, 5)  # the published one and its description count
    store.delete(made.id)
    store.take(third, 10)
    store.end(third)
    assert not list(tmp_path.iterdir())


def test_parallel_uploads_never_exceed_the_capacity(served: Served, http: httpx.Client) -> None:
    content = b'{"custom_id":"a"}\n' * (3 * MIB // 18)
    statuses = []

    def send() -> None:
        with served.http() as own:
            answer = own.post("/v1/files", files={"file": ("b", content)}, data={"purpose": "batch"})
            statuses.append(answer.status_code)

    threads = [threading.Thread(target=send) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 413}
    assert statuses.count(413) >= 3
    assert sum(path.stat().st_size for path in served.state.files.folder.iterdir()) <= 8 * MIB
    for each in http.get("/v1/files").json()["data"]:
        assert http.delete(f"/v1/files/{each['id']}").status_code == 200
    assert upload(served.client(), LINE)


def test_names_that_vanish_while_the_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, 100)
    (tmp_path / ".info-gone").write_bytes(b"12345")
    (tmp_path / "file-stays.data").write_bytes(b"12345")
    scan = os.scandir

    def slow(folder: Path) -> Iterator[os.DirEntry[str]]:
        entries = list(scan(folder))
        (tmp_path / ".info-gone").unlink(missing_ok=True)
        return iter(entries)

    monkeypatch.setattr("headrace.api.file_store.os.scandir", slow)
    path = store.begin()
    with pytest.raises(ApiError):
        store.take(path, 96)
    store.take(path, 95)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b'{"id": "\xff"}', b'{"id": 1}', "other"])
def test_a_damaged_description_harms_no_other_file(client: OpenAI, served: Served, text: bytes | str) -> None:
    good, bad = upload(client, LINE), upload(client, LINE)
    path = served.state.files.folder / f"{bad}.json"
    if isinstance(text, str):
        text = (served.state.files.folder / f"{good}.json").read_bytes()
    path.write_bytes(text)
    listed = [each.id for each in client.files.list(limit=100)]
    assert good in listed
    assert bad not in listed
    with served.http() as http:
        for answer in (
            http.get(f"/v1/files/{bad}"),
            http.get(f"/v1/files/{bad}/content"),
            http.post("/v1/batches", json={"input_file_id": bad, "endpoint": "/v1/completions",
                                           "completion_window": "24h"}),
        ):  # fmt: skip
            assert answer.status_code == 404
            assert "damaged" in error_of(answer)["message"]
        assert http.delete(f"/v1/files/{bad}").json()["deleted"]
        assert http.delete(f"/v1/files/{bad}").status_code == 404
    assert not list(served.state.files.folder.glob(f"{bad}*"))


def test_missing_content_is_told(client: OpenAI, served: Served, http: httpx.Client) -> None:
    file_id = upload(client, LINE)
    served.state.files.data_path(file_id).unlink()
    answer = http.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 404
    assert "not there" in error_of(answer)["message"]
    assert http.delete(f"/v1/files/{file_id}").status_code == 200


def test_a_file_may_be_deleted_while_it_is_read(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1000)
    path = store.begin()
    path.write_bytes(b"content")
    made = store.publish(path, "a", "batch")
    with store.open(made.id) as file:
        store.delete(made.id)
        assert file.read() == b"content"


def test_parts_of_a_file(client: OpenAI, http: httpx.Client) -> None:
    file_id = upload(client, LINE)
    url = f"/v1/files/{file_id}/content"
    for text, wanted in [("bytes=0-4", LINE[:5]), ("bytes=5-", LINE[5:]), ("bytes=-7", LINE[-7:]),
                         ("bytes=1-999999999", LINE[1:]), (f"bytes=-{len(LINE) + 9}", LINE)]:  # fmt: skip
        answer = http.get(url, headers={"range": text})
        begin = LINE.index(wanted)
        assert (answer.status_code, answer.content) == (206, wanted)
        assert answer.headers["content-range"] == f"bytes {begin}-{begin + len(wanted) - 1}/{len(LINE)}"
    several = http.get(url, headers={"range": "bytes=0-1,4-5"})
    assert (several.status_code, several.content) == (200, LINE)
    for text in ("bytes=-", "bytes=9-1", "lines=1-2", "bytes=a-b", "bytes=0-" + "9" * 5000, "bytes=999-1,x"):
        answer = http.get(url, headers={"range": text})
        assert answer.status_code == 400
        assert "Range" in error_of(answer)["message"]
    behind = http.get(url, headers={"range": f"bytes={len(LINE)}-"})
    assert behind.status_code == 416
    assert behind.headers["content-range"] == f"bytes */{len(LINE)}"
    assert str(len(LINE)) in error_of(behind)["message"]


@given(st.integers(0, 50), st.none() | st.integers(0, 60), st.none() | st.integers(0, 60))
def test_ranges_mean_what_slices_mean(size: int, first: int | None, last: int | None) -> None:
    text = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    try:
        part = asked_range(text, size)
    except (InvalidRequest, ApiError):
        return
    assert part is not None
    content = bytes(range(size))
    if first is None:
        assert content[slice(*part)] == content[-last:] if last else content == b""
    else:
        assert content[slice(*part)] == content[first : None if last is None else last + 1] != b""


@pytest.mark.parametrize("text", ["0" * 5000, "0000000019999", "1" * 5000, "٣", "-1", "1.5", ""])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_limits_of_lists_are_numbers_in_bounds(http: httpx.Client, path: str, text: str) -> None:
    answer = http.get(path, params={"limit": text})
    assert answer.status_code == 400
    assert "`limit`" in error_of(answer)["message"]


def test_a_full_disk_is_told(
    served: Served, http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = served.state.files
    begin = files.begin

    def full() -> Path:
        path = begin()
        path.unlink()
        path.symlink_to("/dev/full")  # every write fails as it does on a full disk
        return path

    with monkeypatch.context() as patched:
        patched.setattr(files, "begin", full)
        answer = http.post("/v1/files", files={"file": ("a", LINE)}, data={"purpose": "batch"})
    assert answer.status_code == 507
    assert "disk is full" in error_of(answer)["message"]
    assert not list(files.folder.glob(".*"))
    db = sqlite3.connect(tmp_path / "db")
    db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.Error) as raised:
        db.execute("CREATE TABLE t (x)")
    db.close()
    assert as_api_error(raised.value).status == 507
    wrapped = JobError("the journal cannot be read")
    wrapped.__cause__ = OSError(errno.EDQUOT, "quota")
    assert as_api_error(wrapped).status == 507


def test_errors_of_jobs_have_a_face() -> None:
    assert as_api_error(JobBusy("job x is run by another process")).status == 409
    face = as_api_error(JobError("the journal cannot be read:\nfile is not a database"))
    assert (face.status, str(face)) == (500, "the journal cannot be read: file is not a database")
    assert as_api_error(sqlite3.OperationalError("locked")).code == "internal_error"


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", 1000)
    upload_path = store.begin()
    upload_path.write_bytes(b"x")
    made = store.publish(upload_path, "a", "batch")
    store.end(upload_path)
    result = store.data_path("file-" + "0" * 32)
    result.write_bytes(b"answers")
    result.chmod(0o644)  # as a runner makes it under a common umask
    store.publish(result, "b", "batch_output", "file-" + "0" * 32)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in store.folder.iterdir()] == [0o600] * 4
    assert json.loads((store.folder / f"{made.id}.json").read_bytes())["bytes"] == 1
    (store.folder / ("file-" + "0" * 32 + ".json")).write_bytes(b"")
    again = store.publish(result, "b", "batch_output", "file-" + "0" * 32)  # a damaged description is written anew
    assert again == store.get(again.id)
