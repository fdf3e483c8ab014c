"""Reads files of unknown content, with errors in plain words, and writes files whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file. Raises ValueError, with the name of the file, if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error


def read_json(path: str | Path) -> Any:
    """The content of a JSON file. Raises ValueError, with the name of the file, if it is not JSON."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error


# The exceptions that reading a file of unknown content may raise.
UNUSABLE = (OSError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def reason(error: BaseException) -> str:
    """The fault of a file in words, from an `error` of UNUSABLE."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON (line {error.lineno}: {error.msg})"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, (TypeError, AttributeError)):
        return "a value in it is of the wrong type"
    if isinstance(error, ArithmeticError):
        return "a number in it is zero or too large"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; the complete file is then renamed to `path`. A full disk or an interrupt
    leaves the earlier file as it was."""
    path = Path(path).resolve()
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
