"""/v1/files and /v1/batches by the official client, over the parrot."""

import gzip
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_files import CHAT, LINES, chat_line, ended, jsonl, lines_of, model_folder, stalled, start, upload
from openai import OpenAI
from served import Served, serve_parrot

from headrace.core.config import ServerConfig
from headrace.offline.jobs import runner
from headrace.offline.jobs.folder import create_job
from headrace.offline.jobs.spec import JobSpec, new_job_id


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    config = ServerConfig(max_file_bytes=1 << 20)
    with serve_parrot(config, home=home, path=model_folder(home / "model")) as server:
        yield server


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.client()


def test_a_file_comes_and_goes(client: OpenAI) -> None:
    content = jsonl(chat_line("a", "la"))
    made = client.files.create(file=("../../etc/in.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.object) == (len(content), "in.jsonl", "batch", "file")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    assert made.id in [each.id for each in client.files.list(purpose="batch")]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"{}"), "gzip"),
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"\x7fELF\x00\x01", "binary"),
        (b'[{"custom_id": "a"}]', "array"),
    ],
)
def test_what_is_no_file_of_requests_is_refused_at_once(client: OpenAI, content: bytes, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        upload(client, content)


def test_uploads_have_bounds(served: Served, client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, b"x" * ((1 << 20) + 1))
    assert refused.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"{}"), purpose="fine-tune")
    with served.http() as http:
        assert http.post("/v1/files", json={}).status_code == 415
        assert http.post("/v1/files", data={"purpose": "batch"}, files={"other": b"{}"}).status_code == 400
        cut = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{}'
        kind = {"content-type": "multipart/form-data; boundary=b"}
        assert http.post("/v1/files", content=cut, headers=kind).status_code == 400
    assert not list(served.state.files.folder.glob(".upload-*"))


def test_a_batch_end_to_end(client: OpenAI) -> None:
    lines = [chat_line(f"r{i}", f"song {i}", temperature=0) for i in range(300)]
    batch = start(client, jsonl(*lines), metadata={"who": "me"})
    assert batch.object == "batch"
    assert batch.status in ("validating", "in_progress")
    assert batch.expires_at == batch.created_at + 86400
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.errors is None
    assert batch.error_file_id is None
    assert batch.metadata == {"who": "me"}
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (300, 300, 0)
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    results = lines_of(client, batch.output_file_id)
    by_id = {each["custom_id"]: each["response"] for each in results}
    assert len(results) == len(by_id) == 300
    for i in range(300):
        response = by_id[f"r{i}"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == f"song {i}"
    direct = client.chat.completions.create(**lines[7]["body"])
    same = by_id["r7"]["body"]
    assert same["choices"][0]["message"]["content"] == direct.choices[0].message.content
    assert same["usage"]["completion_tokens"] == direct.usage.completion_tokens  # type: ignore[union-attr]
    assert batch.id in [each.id for each in client.batches.list(limit=3)]


def test_wrong_lines_do_not_stop_the_others(client: OpenAI) -> None:
    long = chat_line("long", "la", max_tokens=10_000)
    content = jsonl(
        chat_line("good", "la"),
        b"{not json",
        b"[1, 2]",
        b'{"custom_id": "\xff"}',
        chat_line("good", "twice"),
        chat_line("elsewhere", "la") | {"url": "/v1/embeddings"},
        chat_line("other", "la") | {"url": "/v1/completions"},
        chat_line("get", "la") | {"method": "GET"},
        {"method": "POST", "url": CHAT, "body": {}},
        chat_line("empty", "la") | {"body": None},
        long,
        chat_line("streamed", "la", stream=True),
        chat_line("typed", "la", temperature="hot"),
        b"",
        chat_line("last", "lo"),
    )
    batch = ended(client, start(client, content))
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (14, 2, 12)
    assert {each["custom_id"] for each in lines_of(client, batch.output_file_id)} == {"good", "last"}
    errors = lines_of(client, batch.error_file_id)
    codes = [
        (each["error"] or {}).get("code") or each["response"]["body"]["error"]["code"] for each in errors
    ]  # fmt: skip
    numbers = [each.get("line") or each["error"]["line"] for each in errors]
    assert numbers == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert codes[:9] == [
        "invalid_json_line", "invalid_json_line", "invalid_json_line", "duplicate_custom_id", "invalid_url",
        "invalid_url", "invalid_method", "missing_required_parameter", "missing_required_parameter",
    ]  # fmt: skip
    by_id = {each["custom_id"]: each for each in errors}
    assert by_id["long"]["response"]["status_code"] == 400
    assert by_id["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert by_id["streamed"]["response"]["body"]["error"]["param"] == "stream"
    assert by_id["typed"]["response"]["body"]["error"]["param"] == "temperature"


def test_what_is_asked_for_is_checked(client: OpenAI) -> None:
    file = upload(client, jsonl(chat_line("a", "la")))
    window: Any = "24h"
    for options, wrong in [
        ({"input_file_id": "file-../../etc/passwd"}, openai.NotFoundError),
        ({"input_file_id": "file-" + "0" * 32}, openai.NotFoundError),
        ({"endpoint": "/v1/embeddings"}, openai.BadRequestError),
        ({"completion_window": "soon"}, openai.BadRequestError),
        ({"completion_window": "999d"}, openai.BadRequestError),
        ({"metadata": {"k": "v" * 600}}, openai.BadRequestError),
    ]:
        asked: Any = {"input_file_id": file, "endpoint": CHAT, "completion_window": window, **options}
        with pytest.raises(wrong):
            client.batches.create(**asked)
    for unknown in ("batch_" + "0" * 32, "batch_..%2F..%2Fetc", "x"):
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve(unknown)
        with pytest.raises(openai.NotFoundError):
            client.batches.cancel(unknown)


def test_a_cancelled_batch_keeps_what_it_has(served: Served, client: OpenAI) -> None:
    with stalled(served, client) as batch:
        batch = client.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled")
        batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    done, failed = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert len(done) >= 20
    assert sorted(each["custom_id"] for each in done + failed) == sorted(line["custom_id"] for line in LINES)
    assert {each["error"]["code"] for each in failed} == {"batch_cancelled"}
    counts = batch.request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (len(done), len(failed))
    other = ended(client, start(client, jsonl(chat_line("a", "la"))))
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(other.id)


def test_an_expired_batch_keeps_what_it_has(served: Served, client: OpenAI) -> None:
    with stalled(served, client, completion_window="1h") as batch:
        served.clock.skip(3601)
        batch = ended(client, batch)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    done, failed = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert len(done) >= 20
    assert sorted(each["custom_id"] for each in done + failed) == sorted(line["custom_id"] for line in LINES)
    assert {each["error"]["code"] for each in failed} == {"batch_expired"}


def test_an_input_may_be_deleted_while_its_batch_runs(served: Served, client: OpenAI) -> None:
    file = upload(client, jsonl(*[chat_line(f"r{i}", "la") for i in range(50)]))
    batch = client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
    client.files.delete(file)
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert len(lines_of(client, batch.output_file_id)) == 50


def test_keys_guard_files_and_batches(tmp_path: Path) -> None:
    config = ServerConfig(api_key="secret")
    with serve_parrot(config, home=tmp_path, path=model_folder(tmp_path / "model")) as served:
        for method, path in [("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches"),
                             ("POST", "/v1/batches"), ("DELETE", "/v1/files/file-0")]:  # fmt: skip
            assert httpx.request(method, f"{served.url}{path}").status_code == 401


def test_a_new_server_goes_on_with_a_batch(tmp_path: Path) -> None:
    home, path = tmp_path / "home", model_folder(tmp_path / "model")
    with serve_parrot(home=home, path=path) as first, stalled(first, first.client()) as batch:
        assert batch.status == "in_progress"
    with serve_parrot(home=home, path=path) as second:
        client = second.client()
        batch = ended(client, client.batches.retrieve(batch.id))
        assert batch.status == "completed"
        ids = [each["custom_id"] for each in lines_of(client, batch.output_file_id)]
        assert sorted(ids) == sorted(line["custom_id"] for line in LINES)
        assert len(second.engine.seen) <= 380


def test_metrics_tell_of_batches(served: Served, client: OpenAI) -> None:
    def lines(result: str) -> float:
        text = httpx.get(f"{served.url}/metrics").text
        found = re.findall(rf'^headrace:batch_requests_total{{.*result="{result}".*}} (\S+)$', text, re.M)
        return float(found[0]) if found else 0.0

    before = lines("completed"), lines("failed")
    batch = ended(client, start(client, jsonl(*(chat_line(str(i), "la") for i in range(6)), b"no request")))
    assert batch.status == "completed"
    assert (lines("completed"), lines("failed")) == (before[0] + 6, before[1] + 1)
    text = httpx.get(f"{served.url}/metrics").text
    for name in ("batches_unfinished", "batch_requests_running", "batch_seconds_left"):
        assert re.search(rf"^headrace:{name}{{.*}} 0.0$", text, re.M)


def test_a_job_of_a_command_is_no_batch(served: Served, client: OpenAI, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl(chat_line("a", "la")))
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("output", "errors")}
    spec = JobSpec(id=new_job_id(), origin="cli", created_at=time.time(), input=str(source), **paths)
    folder = create_job(spec, served.state.jobs)
    for ask in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(folder.id)
    assert folder.state().status == "validating"
    assert Path(spec.output).exists()


def test_a_batch_of_too_many_lines_fails_before_any_of_them(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_LINES", 5)
    batch = ended(client, start(client, b"x\n" * 6))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert "more than 5 lines" in (batch.errors.data or [])[0].message  # type: ignore[operator]
    assert batch.error_file_id is None
    assert ended(client, start(client, b"x\n" * 5)).status == "completed"
