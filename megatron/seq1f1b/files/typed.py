"""Reads files by their declared types. Whatever is wrong is a ValueError of one form: `FILE: place: what is wrong`.

Tested in commands/test_bad_input.py by test_one_sentence.
"""

import csv
import json
import re
import reprlib
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from ..process.near_names import did_you_mean
from .reading import read_text, reason

# No number in a file is larger; this leaves room for products of some of them.
_MOST = 1e30
Positive = Annotated[float, Meta(gt=0, lt=_MOST)]
NonNegative = Annotated[float, Meta(ge=0, lt=_MOST)]
Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, lt=10**12)]

# The types in msgspec's messages, in words.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "null": "nothing",
    "object": "names with values",
    "array": "a list",
}
_LIMITS = {">": " above {}", ">=": " from {} on", "<": " below {}", "<=": " of at most {}"}


def read_toml[T](path: str | Path, kind: type[T]) -> T:
    """The content of a TOML file, of the type `kind`."""
    text = read_text(path)
    try:
        return converted(path, tomllib.loads(text), kind)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: it is not TOML: {error}") from None
    except RecursionError as error:
        raise ValueError(f"{path}: {reason(error)}") from None


def read_json[T](path: str | Path, kind: type[T]) -> T:
    """The content of a JSON file, of the type `kind`."""
    text = read_text(path)
    try:
        data = json.loads(text, object_pairs_hook=_named_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {reason(error)}") from None
    return converted(path, data, kind)


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The names and values of a JSON object; Python itself would take the last of two."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is in one object twice")
    return values


def read_rows[T: Struct](path: str | Path, kind: type[T], content: bytes | None = None) -> Iterator[T]:
    """The rows of a CSV file under a line with their names; an empty cell is None. The names are those of `kind`, in
    their order. `content` is what is known of the file already."""
    names = [field.name for field in msgspec.structs.fields(kind)]
    lines = csv.reader(StringIO(read_text(path, content), newline=""), strict=True)
    try:
        if next(lines, None) != names:
            raise ValueError(f"{path}: line 1: expected the names {','.join(names)}")
        for cells in filter(None, lines):
            place = f"line {lines.line_num}: "
            if len(cells) != len(names):
                raise ValueError(f"{path}: {place}expected {len(names)} cells, not {len(cells)}")
            row = {name: cell or None for name, cell in zip(names, cells, strict=True)}
            yield converted(path, row, kind, place, is_text=True)
    except csv.Error as error:
        raise ValueError(f"{path}: line {lines.line_num}: {error}") from None


def converted[T](source: str | Path, data: Any, kind: type[T], place: str = "", is_text: bool = False) -> T:
    """Plain data as `kind`; where it `is_text`, numbers are written out. Raises ValueError, which starts with the name
    of the `source` and the place in it: that of the data, such as `line 3: `, and names and positions from there on."""
    try:
        return msgspec.convert(data, kind, strict=not is_text)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        steps = re.findall(r"\[(?:\d+|\.\.\.)\]|[^.\[\]`]+", path)
        inside = "".join(step if step.startswith("[") else f".{step}" for step in steps).removeprefix(".")
        where = (place + inside).rstrip(".: ")
        parts = [str(source), where, _in_words(message, data, kind, steps)]
        raise ValueError(": ".join(part for part in parts if part)) from None
    except RecursionError as error:
        raise ValueError(f"{source}: {reason(error)}") from None


def _in_words(message: str, data: Any, kind: Any, steps: Sequence[str]) -> str:
    """A message of msgspec with the value at fault, or with the name that may be meant."""
    if unknown := re.fullmatch(r"(?:Object contains unknown field|Invalid enum value) [`'](.*)[`']", message):
        return f"{unknown[1]!r} is unknown; {_meant(unknown[1], kind, steps)}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        return f"{missing[1]!r} is missing"
    if message == "Number out of range":
        return f"{_value(data, steps)} is out of range"
    types = re.match(r"Expected `([^`]*)`", message)
    if types is None:
        return message
    expected = " or ".join(_WORDS.get(name, name) for name in types[1].split(" | "))
    limit, _, found = message[types.end() :].partition(", got ")
    if bound := re.fullmatch(r" (>=?|<=?) ([-+.\de]+)", limit):
        limit = _LIMITS[bound[1]].format(f"{float(bound[2]):,.12g}")
    return f"expected {expected}{limit}, not {found if found.isdigit() else _value(data, steps)}"


def _value(data: Any, steps: Sequence[str]) -> str:
    """The value at the end of the steps, cut short."""
    for step in steps:
        if step == "[...]":
            return "what is there"
        data = data[int(step[1:-1])] if step.startswith("[") else data[step]
    if data is None:
        return "nothing"
    if isinstance(data, bool):
        return str(data).lower()
    if isinstance(data, dict):
        return _WORDS["object"]
    return _WORDS["array"] if isinstance(data, list) else reprlib.repr(data)


def _meant(name: str, kind: Any, steps: Sequence[str]) -> str:
    """The known name that is near, or all of them."""
    for step in steps:
        if step.startswith("["):
            kind = get_args(kind)[0]
        else:
            kind = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}[step]
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = [str(member.value) for member in kind]
    elif get_origin(kind) is Literal:
        known = [*get_args(kind)]
    else:
        known = [field.encode_name for field in msgspec.structs.fields(kind)]
    known = [*filter(None, known)]
    return did_you_mean(name, known) or f"the names are {', '.join(known)}"


def with_way_out(error: ValueError, way_out: str) -> ValueError:
    """The error with a way out, unless it ends with a question that is one."""
    return ValueError(str(error) if str(error).endswith("?") else f"{error}; {way_out}")


@contextmanager
def named_by(flag: str) -> Iterator[None]:
    """Inside, the error of a file starts with the flag that names the file."""
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{flag} {error}") from None
