"""Documents as they lie in files: found, read one at a time, and parsed into text."""

import json
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from typing import NamedTuple

from .stopping import Refused

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BATCH_BYTES, BATCH_RECORDS = 1 << 18, 1024


class BadDocument(Exception):
    """One document cannot be used; the text gives the reason."""


def refusal(place: str, reason: str) -> Refused:
    return Refused(f"{place}: {reason}; mend or remove it, or use --on-error skip.")


class Record(NamedTuple):
    """A document as it lies in its file, or why it cannot be read; line 0 means the whole file."""

    path: str
    line: int
    raw: bytes
    error: str = ""

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


def find_files(inputs: list[str], glob: str, exclude: list[str]) -> list[str]:
    """All input files, folders in sorted order; an unreadable file is found when it is opened."""
    files: list[str] = []
    for given in inputs:
        if not os.path.exists(given):
            raise Refused(f"--input {given} does not exist.")
        if not os.path.isdir(given):
            files.append(given)
            continue
        for folder, subfolders, names in os.walk(given, onerror=lambda e: files.append(e.filename)):
            wanted = [n for n in subfolders if not any(fnmatch(n, x) for x in exclude)]
            subfolders[:] = sorted(wanted)
            for name in sorted(names):
                path = os.path.join(folder, name)
                # A pipe or socket would block for ever; a broken link is kept, to be reported.
                usable = os.path.isfile(path) or not os.path.exists(path)
                if usable and fnmatch(name, glob) and not any(fnmatch(name, x) for x in exclude):
                    files.append(path)
    if not files:
        raise Refused(f"No file under --input {' '.join(inputs)} matches --glob '{glob}'.")
    return files


def is_json_lines(path: str, input_format: str) -> bool:
    return input_format == "jsonl" or (input_format == "auto" and path.endswith(JSON_SUFFIXES))


def read_records(files: Iterable[str], input_format: str) -> Iterator[Record]:
    """The documents of all files in order, undecoded: decoding and parsing is the workers' job."""
    for path in files:
        try:
            with open(path, "rb") as stream:
                if not is_json_lines(path, input_format):
                    yield Record(path, 0, stream.read())
                    continue
                line = 0
                for line, raw in enumerate(stream, 1):
                    yield Record(path, line, raw)
                if line == 0:
                    yield Record(path, 0, b"")
        except OSError as error:
            yield Record(path, 0, b"", f"unreadable: {error.strerror}")


def parse(record: Record, input_format: str, key: str) -> str:
    """The text of a document. Raises BadDocument."""
    if record.error:
        raise BadDocument(record.error)
    try:
        text = record.raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadDocument(f"not UTF-8: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise BadDocument("empty")
    if not is_json_lines(record.path, input_format):
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadDocument(f"bad JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise BadDocument(f"bad JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadDocument("not a JSON object")
    if key not in value:
        raise BadDocument(f"no key '{key}' (--json-keys)")
    if not isinstance(value[key], str):
        raise BadDocument(f"key '{key}' is not a string")
    if not value[key].strip():
        raise BadDocument("empty")
    return value[key]


def batched(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records in batches that are worth a message to a worker and bounded in memory."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.raw)
        if size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
