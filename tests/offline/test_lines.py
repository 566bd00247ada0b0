"""Batch input files: where lines begin and end, what is a request, what is no such file at all."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.offline.jobs import lines
from headrace.offline.jobs.errors import WrongFile, WrongLine
from headrace.offline.jobs.lines import BLOCK, CHAT, URLS, RawLine, check_file, parse_line, read_lines


def lines_of(tmp: Path, content: bytes, limit: int = 1 << 20, start: int = 0, number: int = 1) -> list[RawLine]:
    path = tmp / "lines"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return list(read_lines(descriptor, start, number, limit))
    finally:
        os.close(descriptor)


@given(rows=st.lists(st.binary(max_size=40).filter(lambda row: b"\n" not in row)), end=st.sampled_from([b"", b"\n"]))
def test_lines_are_numbered_and_can_be_found_again(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], end: bytes
) -> None:
    content = b"\n".join(rows) + end
    found = lines_of(tmp_path_factory.mktemp("l"), content)
    expected = [(i, row) for i, row in enumerate(rows, 1) if row.strip()]
    if not content.startswith(b"\xef\xbb\xbf"):
        assert [(each.number, each.data) for each in found] == expected
    for each in found:
        assert content[each.offset : each.offset + each.length] == each.data
        assert content[each.end - 1 : each.end] == b"\n" or each.end == len(content)


@given(cut=st.integers(0, 19))
def test_reading_goes_on_behind_any_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    content = b"".join(b"%d " % i * (i % 5) + b"\n" for i in range(20))
    tmp = tmp_path_factory.mktemp("l")
    every = lines_of(tmp, content)
    before = [each for each in every if each.number <= cut]
    start, number = (before[-1].end, before[-1].number + 1) if before else (0, 1)
    assert before + lines_of(tmp, content, start=start, number=number) == every


def rows_of(content: bytes, limit: int) -> list[RawLine]:
    """What `read_lines` is to find, told without blocks."""
    found, at = [], 0
    for number, row in enumerate(content.split(b"\n"), 1):
        end = min(at + len(row) + 1, len(content))
        if len(row) > limit or row.strip():
            found.append(RawLine(number, at, len(row), None if len(row) > limit else row, end))
        at += len(row) + 1
    return found


@given(content=st.text("\n\n\n\r x", max_size=80).map(str.encode), limit=st.integers(1, 12), block=st.integers(1, 9))
def test_blank_lines_count_wherever_blocks_end(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, limit: int, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK", block)
        found = lines_of(tmp_path_factory.mktemp("l"), content, limit)
    assert found == rows_of(content, limit)


@pytest.mark.parametrize("blank", [b"\n", b" \r\n"])
def test_blank_lines_are_passed_over_many_at_a_time(tmp_path: Path, blank: bytes) -> None:
    """Calls of C functions are counted; one for each line would be hundreds of thousands."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    content = b"first\n" + blank * 500_000 + b"last"
    sys.setprofile(count)
    try:
        found = lines_of(tmp_path, content)
    finally:
        sys.setprofile(None)
    assert [(each.number, each.data) for each in found] == [(1, b"first"), (500_002, b"last")]
    assert calls < 500


def test_nothing_is_read_behind_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthree\nfour")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for stop, expected in ((0, 0), (3, 0), (4, 1), (9, 2), (14, 3), (100, 4)):
            assert len(list(read_lines(descriptor, stop=stop))) == expected
    finally:
        os.close(descriptor)


def test_a_line_over_the_limit_is_passed_over_and_lines_longer_than_a_block_are_whole(tmp_path: Path) -> None:
    long = b"x" * (2 * BLOCK + 17)
    found = lines_of(tmp_path, b"a\n" + long + b"\nb\n" + long, limit=3 * BLOCK)
    assert [each.data for each in found] == [b"a", long, b"b", long]
    found = lines_of(tmp_path, b"a\n" + long + b"\nb\n" + long, limit=BLOCK)
    assert [(each.number, each.data, each.length) for each in found] == [
        (1, b"a", 1), (2, None, len(long)), (3, b"b", 1), (4, None, len(long)),
    ]  # fmt: skip


def test_a_byte_order_mark_belongs_to_no_line(tmp_path: Path) -> None:
    (first,) = lines_of(tmp_path, b"\xef\xbb\xbf{}\n")
    assert (first.data, first.offset) == (b"{}", 3)


def request(**fields: object) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": {"x": 1}, **fields}).encode()


def test_a_request_is_read_with_its_body_as_it_stands() -> None:
    parsed = parse_line(
        b'{"custom_id":"\\u00e9","method":"POST","url":"/v1/chat/completions","body": {"x" : [1]} }', URLS
    )
    assert (parsed.custom_id, parsed.url, parsed.body) == ("é", CHAT, b'{"x" : [1]}')


@pytest.mark.parametrize(
    ("data", "code", "custom_id"),
    [
        (None, "line_too_long", None),
        (b"{", "invalid_json_line", None),
        (b"7", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b'{"custom_id":"a","body":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json_line", None),
        (b'{"custom_id":"a"} trailing', "invalid_json_line", None),
        (b"{}", "missing_required_parameter", None),
        (request(custom_id=None), "missing_required_parameter", None),
        (request(custom_id=3), "invalid_custom_id", None),
        (request(custom_id=""), "invalid_custom_id", None),
        (request(custom_id="x" * 513), "invalid_custom_id", None),
        (request(method="GET"), "invalid_method", "a"),
        (request(method=None), "invalid_method", "a"),
        (request(url="/v1/embeddings"), "invalid_url", "a"),
        (request(url=["x"]), "invalid_url", "a"),
        (request(body=None), "missing_required_parameter", "a"),
        (request(body=[1]), "missing_required_parameter", "a"),
    ],
)
def test_what_is_no_request_says_why(data: bytes | None, code: str, custom_id: str | None) -> None:
    with pytest.raises(WrongLine) as wrong:
        parse_line(data, URLS)
    assert wrong.value.code == code
    assert wrong.value.custom_id == custom_id
    assert "\n" not in str(wrong.value)


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_anything_at_all_is_a_request_or_a_wrong_line(data: bytes) -> None:
    with pytest.raises(WrongLine):
        parse_line(data, URLS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"), (b" \n\n\t", "empty"), (gzip.compress(b"{}"), "gzip"), (b"PK\x03\x04zip", "zip"),
        (b"\x00\x01", "binary"), (b"PAR1", "Parquet"), (b" [\n{}]", "array"), (b"\xef\xbb\xbf\n", "empty"),
    ],
)  # fmt: skip
def test_what_is_no_file_of_requests(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "in"
    path.write_bytes(content)
    with pytest.raises(WrongFile, match=said):
        check_file(path)


def test_a_file_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(WrongFile, match="not there"):
        check_file(tmp_path / "none")
    with pytest.raises(WrongFile, match="folder"):
        check_file(tmp_path)


def test_a_file_of_too_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x\n" * 6)
    check_file(path)
    check_file(path, most=6)
    with pytest.raises(WrongFile, match="more than 5 lines; split it"):
        check_file(path, most=5)
