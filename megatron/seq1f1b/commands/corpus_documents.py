"""The documents of a corpus: their files, and their texts.

Tested in commands/test_preprocess.py.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..files.reading import opened, reason
from ..files.typed import converted

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
WAY_OUT = "mend or remove it, or use --on-error skip"  # of a document without a text


class Document(NamedTuple):
    place: str
    content: bytes
    is_json: bool


def find_files(inputs: Iterable[str], glob: str) -> list[Path]:
    """All input files, those of folders in sorted order."""
    files: list[Path] = []
    for given in map(Path, inputs):
        if not given.exists():
            raise ValueError(f"--input {given} does not exist")
        if given.is_dir():
            # A pipe or socket in a folder would block for ever.
            files += sorted(path for path in given.rglob(glob) if path.is_file())
        elif given.is_file() or given.is_fifo():
            files.append(given)
        else:
            raise ValueError(f"--input {given} is a device; name files, folders or pipes")
    if not files:
        raise ValueError(f"no file under --input {' '.join(inputs)} matches --glob '{glob}'")
    return files


def documents(files: Iterable[Path], progress: Callable[[int], Any] = lambda num_bytes: None) -> Iterator[Document]:
    """The documents of all files, in order; `progress` is called with the size of each."""
    for path in files:
        with opened(path) as stream:
            is_json = any(suffix.lower() in JSON_SUFFIXES for suffix in path.suffixes)
            for number, content in enumerate(stream if is_json else [stream.read()], 1):
                progress(len(content))
                yield Document(f"{path}:{number}" if is_json else str(path), content, is_json)


def text_of(document: Document, key: str) -> str:
    """The text of a document, which is under `key` in a JSON object. Raises ValueError."""
    try:
        text = document.content.decode("utf-8-sig")
        if document.is_json:
            text = converted("", json.loads(text), _line(key)).text
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(reason(error)) from None
    if not text.strip():
        raise ValueError("it is empty")
    return text


@cache
def _line(key: str) -> Any:
    """The type of a line of JSON, with the text under `key`."""
    return msgspec.defstruct("Line", [("text", str)], rename={"text": key})


def texts(files: Iterable[Path], key: str, skips_bad: bool) -> Iterator[str]:
    """The texts of all documents, in order. Raises ValueError at one without a text, unless this `skips_bad` ones."""
    for document in documents(files):
        try:
            yield text_of(document, key)
        except ValueError as error:
            if not skips_bad:
                raise ValueError(f"{document.place}: {error}; {WAY_OUT}") from None
