"""Lists of files and batches: pages, both orders, and by purpose."""

from collections.abc import Iterator

import openai
import pytest
from batch_files import chat_line, ended, jsonl, model_folder, start, upload
from openai import OpenAI
from served import Served, serve_parrot

LINE = jsonl(chat_line("a", "la"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    with serve_parrot(home=home, path=model_folder(home / "model")) as server:
        yield server


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.client()


def test_lists_come_in_pages(client: OpenAI) -> None:
    ids = [upload(client, LINE) for _ in range(5)]
    listed = [each.id for each in client.files.list(limit=2)]
    assert set(ids) <= set(listed)
    assert len(listed) == len(set(listed))
    with pytest.raises(openai.BadRequestError):
        client.files.list(limit=0)
    with pytest.raises(openai.BadRequestError):
        client.files.list(after="file-unknown")


def test_files_come_in_both_orders(served: Served, client: OpenAI) -> None:
    upload(client, LINE)
    served.clock.skip(2)  # files are made within one second otherwise
    upload(client, LINE)
    newest = [each.id for each in client.files.list(limit=2)]
    oldest = [each.id for each in client.files.list(limit=2, order="asc")]
    assert oldest == newest[::-1]
    made = [each.created_at for each in client.files.list(order="asc")]
    assert made == sorted(made)
    assert made[0] < made[-1]
    assert [each.id for each in client.files.list(after=oldest[0], order="asc")] == oldest[1:]
    with pytest.raises(openai.BadRequestError):
        client.files.list(extra_query={"order": "up"})


def test_files_are_listed_by_purpose(client: OpenAI) -> None:
    batch = ended(client, start(client, LINE))
    results = {each.id for each in client.files.list(purpose="batch_output")}
    inputs = {each.id for each in client.files.list(purpose="batch")}
    assert batch.output_file_id in results
    assert batch.input_file_id in inputs
    assert not results & inputs
    assert {each.purpose for each in client.files.list(purpose="batch_output")} == {"batch_output"}
    assert not client.files.list(purpose="vision").data


def test_batches_come_in_pages(client: OpenAI) -> None:
    ids = [ended(client, start(client, LINE)).id for _ in range(3)][::-1]
    assert [each.id for each in client.batches.list(limit=3).data] == ids
    page = client.batches.list(limit=1, after=ids[0])
    assert [each.id for each in page.data] == ids[1:2]
    assert page.has_more
    assert [each.id for each in client.batches.list(limit=2, after=ids[0]).data] == ids[1:]
    with pytest.raises(openai.BadRequestError):
        client.batches.list(after="batch_" + "0" * 32)
