"""Files that go by themselves: `expires_after` of uploads, `output_expires_after` of batches."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_files import CHAT, chat_line, ended, jsonl, lines_of, model_folder, stalled, start, upload
from openai import OpenAI
from served import Served, serve_parrot

from headrace.api.file_store import FileStore

LINE = jsonl(chat_line("a", "la"))
HOUR: Any = {"anchor": "created_at", "seconds": 3600}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve_parrot(home=tmp_path, path=model_folder(tmp_path / "model")) as server:
        yield server


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.client()


def test_an_upload_expires(served: Served, client: OpenAI) -> None:
    made = client.files.create(file=("in.jsonl", LINE), purpose="batch", expires_after=HOUR)
    stays = upload(client, LINE)
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(stays).expires_at is None
    served.clock.skip(3590)
    assert client.files.retrieve(made.id) == made
    served.clock.skip(11)
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)
    assert [each.id for each in client.files.list()] == [stays]
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=made.id, endpoint=CHAT, completion_window="24h")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"anchor": "created_at", "seconds": "3599"}, "expires_after.seconds"),
        ({"anchor": "created_at", "seconds": "2592001"}, "expires_after.seconds"),
        ({"anchor": "created_at", "seconds": "soon"}, "expires_after.seconds"),
        ({"anchor": "created_at"}, "expires_after.seconds"),
        ({"anchor": "last_active_at", "seconds": "3600"}, "expires_after.anchor"),
        ({"seconds": "3600"}, "expires_after.anchor"),
    ],
)
def test_how_long_files_are_kept_is_checked(served: Served, fields: dict[str, str], param: str) -> None:
    form = {"purpose": "batch", **{f"expires_after[{name}]": value for name, value in fields.items()}}
    body = {"input_file_id": upload(served.client(), LINE), "endpoint": CHAT, "completion_window": "24h"}
    wanted = {name: int(value) if value.isdigit() else value for name, value in fields.items()}
    with served.http() as http:
        of_file = http.post("/v1/files", data=form, files={"file": ("a", LINE)})
        of_batch = http.post("/v1/batches", json={**body, "output_expires_after": wanted})
    for answer, named in ((of_file, param), (of_batch, f"output_{param}")):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", named)
    assert not list(served.state.files.folder.glob(".*"))


@pytest.mark.parametrize("field", ["expires_after", "expires_after[ seconds ]", "expires_after[days]"])
def test_an_end_that_is_named_otherwise_is_not_ignored(served: Served, field: str) -> None:
    form = {"purpose": "batch", field: '{"anchor": "created_at", "seconds": 3600}'}
    with served.http() as http:
        answer = http.post("/v1/files", data=form, files={"file": ("a", LINE)})
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


def test_an_expired_input_harms_no_batch(served: Served, client: OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", jsonl(*(chat_line(str(i), "la") for i in range(50)))),
                               purpose="batch", expires_after=HOUR)  # fmt: skip
    with stalled(served, client) as running:
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="48h")
        served.clock.skip(3601)
        served.state.files.sweep()
        assert not served.state.files.data_path(file.id).exists()
    client.batches.cancel(running.id)
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert len(lines_of(client, batch.output_file_id)) == 50


def test_results_expire(served: Served, client: OpenAI) -> None:
    content = jsonl(chat_line("a", "la"), b"wrong")
    batch = ended(client, start(client, content, output_expires_after=HOUR))
    kept = ended(client, start(client, content))
    output, errors = (client.files.retrieve(str(each)) for each in (batch.output_file_id, batch.error_file_id))
    assert output.expires_at == output.created_at + 3600
    assert errors.expires_at == errors.created_at + 3600
    served.clock.skip(3601)
    for each in (output, errors):
        with pytest.raises(openai.NotFoundError):
            client.files.content(each.id)
    assert lines_of(client, kept.output_file_id)


def test_what_has_expired_does_not_come_back(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    with serve_parrot(home=tmp_path, path=path) as first:
        client = first.client()
        batch = ended(client, start(client, LINE, output_expires_after=HOUR))
        description = first.state.files.folder / f"{batch.output_file_id}.json"
        description.write_bytes(description.read_bytes().replace(b'"expires_at":', b'"expires_at":1,"was":'))
    with serve_parrot(home=tmp_path, path=path) as second:  # which makes known what lies there unknown
        with pytest.raises(openai.NotFoundError):
            second.client().files.retrieve(str(batch.output_file_id))
        second.wait(lambda: not list(second.state.files.folder.glob(f"{batch.output_file_id}*")))


def test_expired_files_leave_the_disk(tmp_path: Path) -> None:
    now = time.time()
    store = FileStore(tmp_path, 1000, clock=lambda: now)
    made = []
    for kept_s in (3600, 7200, None):
        path = store.begin()
        path.write_bytes(b"x")
        made.append(store.publish(path, "a", "batch", kept_s=kept_s).id)
        store.end(path)
    now += 3600
    store.sweep()
    assert {path.stem for path in tmp_path.iterdir()} == set(made[1:])
    now += 3600
    store.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {f"{made[2]}.json", f"{made[2]}.data"}
