"""The content of files that may hold anything; errors are in plain words."""

import ast
import json
import warnings
from pathlib import Path
from typing import BinaryIO

from ..process.job_store import in_time

_MOST = 2**30  # bytes of a pipe or device, which may have no end
_PATIENCE = 10.0  # seconds within which somebody must open a pipe to write to it


def opened(path: str | Path) -> BinaryIO:
    """A file or pipe, open to be read. Raises ValueError, with the name of the file, if it cannot be."""
    try:
        if not Path(path).is_fifo():
            return open(path, "rb")
        return in_time(_PATIENCE, lambda: open(path, "rb"))  # which waits for somebody who writes
    except OSError as error:
        raise ValueError(f"{path}: {reason(error)}") from error
    except RuntimeError:
        raise ValueError(f"{path}: nobody has written to this pipe for {_PATIENCE:g} s; name a file") from None


def read_bytes(path: str | Path) -> bytes:
    """The content of a file or pipe. Raises ValueError, with the name of the file, if it cannot be read."""
    try:
        with opened(path) as file:
            if Path(path).is_file():
                return file.read()
            content = file.read(_MOST + 1)
    except OSError as error:
        raise ValueError(f"{path}: {reason(error)}") from error
    if len(content) > _MOST:
        raise ValueError(f"{path}: it does not end within {_MOST:,} bytes; name a file")
    return content


def read_text(path: str | Path, content: bytes | None = None) -> str:
    """The text of a UTF-8 file, or of what is known to be its `content`. Raises ValueError, with the name of the file,
    if it cannot be read."""
    if content is None:
        content = read_bytes(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {reason(error)}") from error


def check_program(path: str | Path) -> None:
    """Raise ValueError, with the name of the file, unless it can be read and is a Python program."""
    content = read_bytes(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # the program prints its own
            ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        words = error.msg if isinstance(error, SyntaxError) else reason(error)
        raise ValueError(f"{path}: it is not a Python program: {place}{words}; name the training script") from None


def reason(error: BaseException) -> str:
    """What is wrong with a file, or with JSON in it, in words."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
