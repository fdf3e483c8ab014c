"""The content of files that may hold anything; errors are in plain words."""

import ast
import json
import os
import warnings
from pathlib import Path
from typing import BinaryIO

from ..process.threads import in_time

# Bytes that are read at most: of a pipe or device, which may have no end, and of a file, which may be another one than
# was meant. The timeline of a step of a million actions has a tenth of that.
_MOST = 2**30
_NO_TEXT = "it is not UTF-8 text"
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


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """The content of a file or pipe. Raises ValueError, with the name of the file, if it cannot be read, or if it has
    more than `most` bytes; a file is not even read then."""
    most = _MOST if most is None else most
    try:
        with opened(path) as file:
            if Path(path).is_file():
                size = os.fstat(file.fileno()).st_size
                if size > most:
                    raise ValueError(
                        f"{path}: it has {size:,} bytes, and the most are {most:,} here; name another file"
                    )
                return file.read()
            content = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{path}: {reason(error)}") from error
    if len(content) > most:
        raise ValueError(f"{path}: it does not end within {most:,} bytes; name a file")
    return content


def read_text(path: str | Path, content: bytes | None = None) -> str:
    """The text of a UTF-8 file, or of what is known to be its `content`. Raises ValueError, with the name of the file,
    if it cannot be read."""
    if content is None:
        content = read_bytes(path)
    try:
        if b"\0" in content:  # UTF-8, but no text: a gibibyte of them would be parsed
            raise ValueError(_NO_TEXT)
        return content.decode("utf-8-sig")
    except ValueError as error:
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
        return _NO_TEXT
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
