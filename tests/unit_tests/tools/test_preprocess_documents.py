"""Finding, reading and parsing documents: what is bad is named by file and line."""

import os

import pytest

from megatron.seq1f1b.preprocessing.documents import (
    BATCH_RECORDS,
    BadDocument,
    Record,
    batched,
    find_files,
    parse,
    read_records,
)
from megatron.seq1f1b.preprocessing.stopping import Refused


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "site-packages").mkdir()
    for name in ("z.py", "a.txt", "b/c.py", "site-packages/d.py"):
        (tmp_path / name).write_text(name)
    os.symlink(tmp_path / "nowhere", tmp_path / "b" / "broken.py")
    os.mkfifo(tmp_path / "pipe.py")
    return tmp_path


def test_a_folder_is_searched_in_order_and_pipes_are_left_alone(folder):
    found = find_files([str(folder)], "*.py", ["site-packages"])
    assert [os.path.relpath(path, folder) for path in found] == ["z.py", "b/broken.py", "b/c.py"]


@pytest.mark.parametrize("given, named", [("nowhere", "--input"), (".", "--glob '*.rs'")])
def test_nothing_to_read_is_refused_by_the_name_of_the_flag(folder, given, named):
    with pytest.raises(Refused, match=named.replace("*", r"\*")):
        find_files([str(folder / given)], "*.rs", [])


def test_unreadable_and_empty_files_become_records_that_say_so(folder):
    (folder / "none.jsonl").touch()
    files = [str(folder / "b" / "broken.py"), str(folder / "none.jsonl")]
    reasons = []
    for record in read_records(files, "auto"):
        with pytest.raises(BadDocument) as bad:
            parse(record, "auto", "text")
        reasons.append((record.place, str(bad.value)))
    assert reasons == [
        (files[0], "unreadable: No such file or directory"),
        (files[1], "empty"),
    ]


@pytest.mark.parametrize(
    "raw, reason",
    [
        (b"\n", "empty"),
        (b'{"text": " \\n"}', "empty"),
        (b'{"text": "a"', "bad JSON: Expecting ',' delimiter at column 13"),
        (b"[" * 100_000, "bad JSON"),
        (b'"text"', "not a JSON object"),
        (b'{"txt": "a"}', r"no key 'text' \(--json-keys\)"),
        (b'{"text": 1}', "key 'text' is not a string"),
        (b'{"text": "\xff"}', "not UTF-8: invalid start byte at byte 10"),
    ],
)
def test_every_kind_of_bad_line_has_its_reason(raw, reason):
    with pytest.raises(BadDocument, match=reason):
        parse(Record("a.jsonl", 7, raw), "auto", "text")


def test_text_is_kept_to_the_letter_but_for_a_byte_order_mark():
    text = "\r\n\tnaïve 🙂 \r\n"
    assert parse(Record("a.txt", 0, b"\xef\xbb\xbf" + text.encode()), "auto", "text") == text


def test_lines_are_read_only_as_far_as_needed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * (3 * BATCH_RECORDS))
    records = read_records([str(path)], "auto")
    first = next(batched(records))
    assert len(first) == BATCH_RECORDS
    assert [first[0].place, first[-1].place] == [f"{path}:1", f"{path}:{BATCH_RECORDS}"]
    assert next(records).line == BATCH_RECORDS + 1  # nothing was read ahead


def test_the_format_can_be_forced(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert len(list(read_records([str(path)], "jsonl"))) == 2
    assert len(list(read_records([str(path)], "auto"))) == 1
